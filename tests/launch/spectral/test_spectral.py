"""Spectra against dense numpy: every family, this project's checkpoints, and known random ones."""

import csv
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mixtron.launch.spectral.cli import app
from mixtron.launch.spectral.heads import head_spectra
from mixtron.launch.spectral.open import open_model
from mixtron.launch.spectral.report import measure
from mixtron.launch.spectral.weights import SpectralError
from tests.contract.cases import ONE_RANK, TP2, Case
from tests.helpers.ranks import run_on_ranks
from tests.launch.spectral.folders import FAMILIES, LAYERS, D, H, K, write

QUIET = Console(quiet=True)


def dense(M_DD: np.ndarray, count: int) -> dict:
    """The same numbers from the whole [D, D] matrix; `count` eigenvalues can differ from 0."""

    def rank(s):
        p = s[s > 0] / s.sum() if s.sum() else s
        return float(np.exp(-(p * np.log(p)).sum())) if s.sum() else 0.0

    routing, filtering = (M_DD - M_DD.T) / 2, (M_DD + M_DD.T) / 2
    singular = [np.linalg.svd(x, compute_uv=False) for x in (routing, filtering)]
    values = np.linalg.eigvals(M_DD)
    values = values[np.argsort(-np.abs(values))][:count]
    return {
        "routing_share": float((routing**2).sum() / (M_DD**2).sum()),
        "routing_rank": rank(singular[0]),
        "filtering_rank": rank(singular[1]),
        "routing_count": int((singular[0] > 0.01 * singular[0][0]).sum()),
        "filtering_count": int((singular[1] > 0.01 * singular[1][0]).sum()),
        "largest_real": float(values.real.max()),
    }


def assert_equal(head, expected: dict):
    for name, value in expected.items():
        assert getattr(head, name) == pytest.approx(value, rel=1e-6, abs=1e-9), name


def interactions(family: str, folder) -> list[list[np.ndarray]]:
    """M [D, D] of each layer and head, written out for each family on its own."""
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= {name: x.double().numpy() for name, x in load_file(file).items()}
    return [[_interaction(family, stored, i, h) for h in range(H)] for i in range(LAYERS)]


def _interaction(family, stored, i, h):
    rows = slice(h * K, (h + 1) * K)
    if family == "gpt2":
        block = f"transformer.h.{i}."
        gain, fused = stored[f"{block}ln_1.weight"], stored[f"{block}attn.c_attn.weight"]
        q, k = fused[:, :D][:, rows].T, fused[:, D : 2 * D][:, rows].T
    elif family == "bert":
        before = f"encoder.layer.{i - 1}.output" if i else "embeddings"
        gain = stored[f"bert.{before}.LayerNorm.weight"]
        own = f"bert.encoder.layer.{i}.attention.self."
        q, k = stored[f"{own}query.weight"][rows], stored[f"{own}key.weight"][rows]
    elif family == "gpt_neox":
        block = f"gpt_neox.layers.{i}."
        gain = stored[f"{block}input_layernorm.weight"]
        fused = stored[f"{block}attention.query_key_value.weight"]
        first = 3 * K * h
        q, k = fused[first : first + K], fused[first + K : first + 2 * K]
    else:
        block = f"model.layers.{i}."
        gain = stored[f"{block}input_layernorm.weight"]
        q = stored[f"{block}self_attn.q_proj.weight"][rows]
        k = stored[f"{block}self_attn.k_proj.weight"]
        if family == "qwen3":
            q = stored[f"{block}self_attn.q_norm.weight"][:, None] * q
            k = stored[f"{block}self_attn.k_norm.weight"][:, None] * k
    return (q * gain).T @ (k * gain)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_dense_numpy(family, tmp_path):
    folder = write(family, tmp_path / "model")
    spectra = measure(open_model(folder), QUIET)
    assert list(spectra.heads) == list(range(LAYERS))
    for heads, matrices in zip(spectra.heads.values(), interactions(family, folder), strict=True):
        for head, M_DD in zip(heads, matrices, strict=True):
            assert_equal(head, dense(M_DD, K))
            expected = np.linalg.eigvals(M_DD)
            expected = sorted(expected, key=abs)[-K:]
            np.testing.assert_allclose(
                np.sort_complex(np.round(head.eigenvalues, 6)),
                np.sort_complex(np.round(expected, 6)),
                atol=3e-6 * np.abs(expected).max(),
            )
    notes = " ".join(spectra.notes)
    assert ("rotary" in notes) == (family in ("gpt_neox", "llama", "qwen3"))
    assert ("biases" in notes) == (family in ("gpt2", "bert", "gpt_neox"))
    assert ("25%" in notes) == (family == "gpt_neox")


def test_bf16_weights_and_names_without_a_prefix(tmp_path):
    folder = write("gpt2", tmp_path / "model", torch.bfloat16)
    with_prefix = measure(open_model(folder), QUIET)
    file = folder / "model-0.safetensors"
    bare = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    save_file(bare, file)
    assert measure(open_model(folder), QUIET).heads == with_prefix.heads


@pytest.mark.parametrize("width", [64, 12])
def test_a_head_wider_than_its_inputs(width):
    """2K above D: everything lives in D dimensions."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, width, 16, generator=generator, dtype=torch.float64)
    (head,) = head_spectra(q, k)
    M_DD = (q[0].T @ k[0]).numpy()
    expected = dense(M_DD, 16)
    expected.pop("largest_real")  # beyond D eigenvalues are 0, up to rounding
    assert_equal(head, expected)


def test_sd_heads_are_pure_routing():
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 3, 8, 40, generator=generator, dtype=torch.float64)
    for head, q_KD, k_KD in zip(head_spectra(q, k, sd=True), q, k, strict=True):
        S_DD = (q_KD.T @ k_KD - k_KD.T @ q_KD).numpy()
        expected = dense(S_DD, 16) | {"filtering_rank": 0.0, "filtering_count": 0}
        expected["largest_real"] = 0.0
        assert_equal(head, expected)
        assert head.routing_share == pytest.approx(1.0)
        assert all(x.real == 0 for x in head.eigenvalues)
        found = np.sort(np.imag(head.eigenvalues))
        np.testing.assert_allclose(
            found, np.sort(np.linalg.eigvals(S_DD).imag)[[*range(8), *range(-8, 0)]], atol=1e-9
        )


def test_one_plane_of_rotation_has_rank_two():
    q, k = torch.zeros(2, 1, 4, 10, dtype=torch.float64)
    q[0, 0, 1], k[0, 0, 2] = 3.0, 2.0
    (head,) = head_spectra(q, k, sd=True)
    assert (head.routing_rank, head.routing_count) == (pytest.approx(2.0), 2)


def test_random_weights_of_gpt2s_size_give_known_values():
    """Independent N(0, s^2) queries and keys, D = 768, K = 64.

    E|skew|^2 / E|M|^2 = (1 - 1/D) / 2, since E tr(M M) = K D s^4 and E|M|^2 = K D^2 s^4. W_K W_Q^T
    has entries of variance D s^4: its eigenvalues fill the disc of radius s^2 sqrt(D K) evenly
    (circular law), so their mean square is half the radius' and every head has some of positive
    real part. As W_Q and W_K are nearly orthogonal to each other, all 2K singular values of both
    parts are of one size.
    """
    size, width, heads, std = 768, 64, 12, 0.02
    generator = torch.Generator().manual_seed(0)
    q, k = std * torch.randn(2, heads, width, size, generator=generator, dtype=torch.float64)
    spectra = head_spectra(q, k)
    share = np.mean([head.routing_share for head in spectra])
    assert share == pytest.approx((1 - 1 / size) / 2, abs=0.003)
    radius = std**2 * np.sqrt(size * width)
    values = np.array([head.eigenvalues for head in spectra])
    assert np.mean(np.abs(values) ** 2) == pytest.approx(radius**2 / 2, rel=0.1)
    # Of one 64 x 64 matrix the largest strays by a third at most; the mean over heads hardly.
    assert np.abs(values).max(-1).mean() == pytest.approx(radius, rel=0.1)
    for head in spectra:
        assert 0 < head.largest_real < 1.5 * radius
        assert head.routing_count == head.filtering_count == 2 * width
        assert 0.9 * 2 * width < head.routing_rank < 2 * width


def save(case: Case, layout, folder) -> None:
    """A checkpoint with the case's config in it."""
    from mixtron.launch.checkpoint import save_checkpoint
    from tests.contract.steps import build

    model = build(case, layout)
    config = case.config(layout).model_dump(mode="json")
    save_checkpoint(
        folder / "checkpoints",
        3,
        model.wrapped,
        model.optimizer,  # type: ignore[arg-type]
        model.ranks,
        state={},
        config=config,
    )


def weights(case: Case) -> dict[str, np.ndarray]:
    from tests.contract.steps import build

    return {name: p.detach().double().numpy() for name, p in build(case, ONE_RANK).parameters()}


@pytest.mark.parametrize("layout", [ONE_RANK, TP2], ids=lambda layout: layout.name)
@pytest.mark.parametrize("mixer", ["sd_attention", "softmax_attention"])
def test_own_checkpoints_equal_dense_numpy(mixer, layout, tmp_path):
    case = Case(mixer)
    run_on_ranks(layout.world_size, save, case, layout, tmp_path)
    [stored] = run_on_ranks(1, weights, case)
    spectra = measure(open_model(tmp_path), QUIET)
    config = case.config(ONE_RANK)
    for layer, heads in spectra.heads.items():
        own = config.mixers[config.model.layer_mixers[layer]]
        groups = own.heads // getattr(own, "kv_heads", own.heads)
        block = f"decoder.layers.{layer}."
        gain = stored[f"{block}input_layernorm.weight"]
        fused = stored[f"{block}self_attention.in_proj.weight"] * gain
        width = own.head_dim
        q_all, k_all = fused[: own.heads * width], fused[own.heads * width :]
        for h, head in enumerate(heads):
            q = q_all[h * width : (h + 1) * width]
            k = k_all[h // groups * width : (h // groups + 1) * width]
            M_DD = q.T @ k - k.T @ q if mixer == "sd_attention" else q.T @ k
            expected = dense(M_DD, width)
            if mixer == "sd_attention":
                expected |= {"filtering_rank": 0.0, "filtering_count": 0, "largest_real": 0.0}
            assert_equal(head, expected)


def test_the_command_writes_table_json_csv_and_plot(tmp_path):
    folder = write("gpt_neox", tmp_path / "model")
    result = CliRunner().invoke(app, [str(folder), "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "routing" in result.output
    found = json.loads((tmp_path / "out/spectral.json").read_text())
    assert [len(layer["heads"]) for layer in found["layers"]] == [H] * LAYERS
    assert len(found["layers"][0]["heads"][0]["eigenvalues"]) == K
    with (tmp_path / "out/spectral.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == H * LAYERS
    head = found["layers"][1]["heads"][2]
    assert float(rows[-1]["routing_rank"]) == head["routing_rank"]
    assert (tmp_path / "out/cascade.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_measured_is_named(tmp_path):
    with pytest.raises(SpectralError, match="no such folder"):
        open_model(tmp_path / "absent")
    with pytest.raises(SpectralError, match="neither a run"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SpectralError, match=r"no \*.safetensors"):
        open_model(tmp_path)
    folder = write("llama", tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(SpectralError, match="model_type 't5'; known: gpt2"):
        open_model(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_head": 3, "n_layer": 2}')
    with pytest.raises(SpectralError, match=r"no tensor h.0.attn.c_attn.weight"):
        open_model(folder)
