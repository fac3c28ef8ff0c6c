"""Surgery on layers is exact where it says so, and what it writes trains on."""

import json
import signal
from pathlib import Path

import pytest
import torch

from mixtron.kernels.linear_attention.reference import features
from mixtron.launch.spectral import mappings
from mixtron.launch.spectral.mappings import Layer
from mixtron.launch.spectral.weights import SpectralError
from mixtron.megatron_ext.mixers.linear_attention.config import Config as LinearAttention
from mixtron.megatron_ext.mixers.sd_attention.config import Config as SDAttention
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxAttention
from tests.helpers.jobs import small_config, write_config
from tests.helpers.ranks import run_on_ranks

D, H, K = 40, 3, 8
SD = SDAttention(heads=H, head_dim=K, rope_base=None)
SOFTMAX = SoftmaxAttention(heads=H, kv_heads=1, head_dim=K, rope_base=None)


def make_layer(mixer) -> Layer:
    generator = torch.Generator().manual_seed(4)
    tensors = {
        f"in_proj.weight.{name}": torch.randn(rows, D, generator=generator)
        for name, rows in mixer.components().items()
    }
    tensors["out_proj.weight"] = torch.randn(D, H * K, generator=generator)
    if isinstance(mixer, SDAttention):
        tensors["damping_bias"] = torch.randn(H, generator=generator)
    return Layer(mixer, tensors, torch.rand(D, generator=generator) + 0.5)


def scores(layer: Layer, x_TD: torch.Tensor) -> torch.Tensor:
    """[H, T, T]: the layer's logits off the diagonal, or the weights of linear attention, fp64."""
    x_TD, mixer = x_TD.double() * layer.gain_D.double(), layer.mixer
    groups = getattr(mixer, "kv_heads", mixer.heads)
    q_HTK, k_GTK = (
        (x_TD @ layer.tensors[f"in_proj.weight.{name}"].double().t())
        .unflatten(1, (heads, -1))
        .transpose(0, 1)
        for name, heads in (("query", mixer.heads), ("key", groups))
    )
    k_HTK = k_GTK.repeat_interleave(mixer.heads // groups, dim=0)
    if isinstance(mixer, LinearAttention):
        return features(q_HTK) @ features(k_HTK).mT
    found = q_HTK @ k_HTK.mT * mixer.head_dim**-0.5
    return found - found.mT if isinstance(mixer, SDAttention) else found


@pytest.fixture
def x_TD():
    return torch.randn(30, D, generator=torch.Generator().manual_seed(6))


def assert_close(found, expected):
    """Weights are fp32."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_the_parts_of_softmax_scores(x_TD):
    layer = make_layer(SOFTMAX)
    whole = scores(layer, x_TD)
    skew, symmetric = mappings.without_filtering(layer), mappings.without_routing(layer)
    assert isinstance(skew.mixer, SDAttention)
    assert_close(scores(skew, x_TD), (whole - whole.mT) / 2)
    assert_close(scores(symmetric, x_TD), (whole + whole.mT) / 2)
    assert_close(scores(skew, x_TD) + scores(symmetric, x_TD), whole)
    assert float(torch.nn.functional.softplus(skew.tensors["damping_bias"]).max()) < 1e-12


def test_softmax_values_pass_through_wider_heads():
    layer = make_layer(SOFTMAX)
    wide = mappings.without_routing(layer)
    v_VD = layer.tensors["in_proj.weight.value"]
    o_DHV = layer.tensors["out_proj.weight"].unflatten(1, (H, K))
    v_HED = wide.tensors["in_proj.weight.value"].unflatten(0, (H, 2 * K))
    o_DHE = wide.tensors["out_proj.weight"].unflatten(1, (H, 2 * K))
    for h in range(H):
        torch.testing.assert_close(o_DHE[:, h] @ v_HED[h], o_DHV[:, h] @ v_VD)


def test_sd_without_routing_or_filtering(x_TD):
    layer = make_layer(SD)
    assert not scores(mappings.without_routing(layer), x_TD).any()
    still = mappings.without_filtering(layer)
    assert torch.equal(scores(still, x_TD), scores(layer, x_TD))
    assert still.mixer.d == "head"
    assert "in_proj.weight.damping" not in still.tensors


@pytest.mark.parametrize("rank", [2, 6, 2 * K])
def test_truncation_is_the_nearest_of_its_rank(rank):
    """By the norm's gain: what is left out are the smallest singular values of the folded S."""
    layer = make_layer(SD)
    cut = mappings.truncated(layer, rank)
    for whole, kept in zip(skew_matrices(layer), skew_matrices(cut), strict=True):
        singular = torch.linalg.svdvals(whole)
        error = torch.linalg.matrix_norm(whole - kept)
        expected = singular[rank:].square().sum().sqrt()
        torch.testing.assert_close(error, expected, rtol=1e-4, atol=1e-3)
        assert torch.linalg.matrix_rank(kept, rtol=1e-5) == rank


def skew_matrices(layer: Layer) -> list[torch.Tensor]:
    q_HKD, k_HKD, _ = layer.heads()
    q_HKD, k_HKD = (x.double() * layer.gain_D.double() for x in (q_HKD, k_HKD))
    return list(q_HKD.mT @ k_HKD - k_HKD.mT @ q_HKD)


@pytest.mark.parametrize("mixer", [SD, SOFTMAX], ids=lambda mixer: mixer.type)
def test_projection_to_narrower_heads_is_exact_where_the_rank_allows(mixer, x_TD):
    layer = make_layer(mixer)
    narrow = {}
    for name, x in layer.tensors.items():
        if "damping" in name:
            narrow[name] = x
        elif name == "out_proj.weight":
            narrow[name] = x.unflatten(1, (H, K))[..., :3]
            narrow[name] = torch.nn.functional.pad(narrow[name], (0, K - 3)).flatten(1)
        else:
            heads = x.unflatten(0, (-1, K)).clone()
            heads[:, 3:] = 0
            narrow[name] = heads.flatten(0, 1)
    layer = Layer(layer.mixer, narrow, layer.gain_D)
    small = mappings.narrowed(layer, 4)
    assert small.mixer.head_dim == 4
    assert_close(scores(small, x_TD), scores(layer, x_TD))
    _, _, v_HVD = layer.heads()
    _, _, small_HVD = small.heads()
    o_DHV = layer.tensors["out_proj.weight"].unflatten(1, (H, K))
    small_DHV = small.tensors["out_proj.weight"].unflatten(1, (H, 4))
    for h in range(H):
        assert_close(small_DHV[:, h] @ small_HVD[h], o_DHV[:, h] @ v_HVD[h])


@pytest.mark.parametrize("mixer", [SD, SOFTMAX], ids=lambda mixer: mixer.type)
def test_linearisation_keeps_what_the_scores_are_products_of(mixer, x_TD):
    """Near 0 features are 1 + x: what query and key do together is the score, to first order."""
    layer = make_layer(mixer)
    small = 1e-4 * x_TD
    assert_close_by(
        1e-2, together(scores(mappings.linearised(layer), small)), together(scores(layer, small))
    )


def together(x_HTT):
    """Without what either token does alone."""
    rows, columns = x_HTT.mean(1, keepdim=True), x_HTT.mean(2, keepdim=True)
    return x_HTT - rows - columns + x_HTT.mean((1, 2), keepdim=True)


def assert_close_by(tolerance, found, expected):
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def test_what_has_no_mapping_is_named():
    with pytest.raises(SpectralError, match="rope_base=null"):
        mappings.truncated(make_layer(SD.model_copy(update={"rope_base": 1e4})), 2)
    with pytest.raises(SpectralError, match="even ranks"):
        mappings.truncated(make_layer(SD), 3)
    with pytest.raises(SpectralError, match="qk_norm or window"):
        mappings.linearised(make_layer(SOFTMAX.model_copy(update={"window": 4})))
    with pytest.raises(SpectralError, match="linear_attention"):
        mappings.linearised(make_layer(LinearAttention(heads=H, key_dim=K, value_dim=K)))


def sd_and_softmax(corpus: Path, folder: Path) -> Path:
    """A run of one softmax and two S-D layers."""
    config = small_config(corpus, folder / "run")
    config["model"] |= {"layers": 3, "pattern": ["sd", "attention", "sd"], "dropout": 0.0}
    config["model"]["init_std"] = 0.1
    config["mixers"] = {
        "sd": SDAttention(heads=4, head_dim=16, rope_base=None).model_dump(),
        "attention": SoftmaxAttention(
            heads=4, kv_heads=2, head_dim=16, rope_base=None
        ).model_dump(),
    }
    return write_config(folder / "config.yaml", config)


def train(config_path: Path, overrides: list[str]) -> int:
    """Trains in this rank; the last step's number."""
    from mixtron.launch import loop
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.setup_run import prepare

    config = load_config(config_path, overrides)
    run = prepare(config, *open_data(config)[1:])
    assert loop.train(run) == 0
    return run.progress.step


def operate(run_dir: Path, folder: Path) -> dict:
    """Every command of surgery in this rank, in the way the command line calls them."""
    from mixtron.launch.signals import STOP_SIGNALS, unblock
    from mixtron.launch.spectral import surgery_cli

    unblock()
    report = folder / "report"
    surgery_cli.linearise([run_dir], layers=1, output=folder / "linear", report=report)
    surgery_cli.ablate(
        [run_dir], rank=[2], keep="mean-damping", output=folder / "averaged", report=report
    )
    options = {"margin": 0.25, "hybrid": False, "threshold": 4.0, "linear": "linear_attention"}
    surgery_cli.allocate(run_dir, folder / "narrow", **options, initialise=True)
    options |= {"hybrid": True, "threshold": 1e9}
    surgery_cli.allocate(run_dir, folder / "hybrid", **options, initialise=True)
    surgery_cli.allocate(run_dir, folder / "kla", **(options | {"linear": "kla"}), initialise=False)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert blocked.isdisjoint(STOP_SIGNALS), "nobody looks at them here"
    return {
        stem: json.loads((report / f"{stem}.json").read_text())[str(run_dir)]
        for stem in ("linearise", "ablate")
    }


def test_every_operation_reports_and_writes_a_run_that_trains_on(corpus, tmp_path):
    """From a checkpoint of two tensor-parallel ranks."""
    path = sd_and_softmax(corpus, tmp_path)
    run_on_ranks(2, train, path, [])
    [found] = run_on_ranks(1, operate, tmp_path / "run", tmp_path)

    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    [last] = [json.loads(x)["validation/speeches"] for x in lines if "validation" in x][-1:]
    curve = found["linearise"]
    assert [row["linear_layers"] for row in curve] == [0, 1, 2, 3]
    assert curve[0]["perplexity"] == pytest.approx(float(torch.tensor(last).exp()), rel=1e-4)
    ablated = {row["ablation"]: row["change_percent"] for row in found["ablate"]}
    assert set(ablated) == {
        *("none", "no-routing", "no-filtering", "mean-damping"),
        *("layer-0-rank-2", "layer-2-rank-2"),
    }
    assert abs(ablated["mean-damping"]) < abs(ablated["no-routing"])

    expected = {
        "linear": ["linear_attention", "attention", "sd"],
        "averaged": ["sd_16", "attention", "sd_16"],
        "narrow": ["sd_8", "attention_8", "sd_8"],
        "hybrid": ["linear_attention", "linear_attention_2", "linear_attention"],
        "kla": ["kla", "kla", "kla"],
    }
    for name, pattern in expected.items():
        config = tmp_path / name / "config.yaml"
        overrides = [
            *("training.steps=2", "checkpoint.allow_changes=[training.steps]"),
            *("parallel.tensor=1", "parallel.sequence=false"),
        ]
        assert run_on_ranks(1, train, config, overrides) == [2], name
        resolved = config.read_text()
        assert all(f"- {mixer}\n" in resolved for mixer in pattern), name
