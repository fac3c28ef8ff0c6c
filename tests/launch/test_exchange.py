"""Models from and to Hugging Face folders give the logits that transformers gives."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_on_ranks

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "head_dim": 16, "rms_norm_eps": 1e-3},
    "mistral": {
        "sliding_window": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gpt_neox": {"layer_norm_eps": 1e-4},
    "gpt_neox sequential": {"use_parallel_residual": False, "attention_bias": False},
}
TOLERANCE = 1e-5
"""Of the largest logit: fp32 sums in another order through two layers."""


def exchanged(family: str, folder: str) -> dict[str, float | bool | str]:
    """There and back: what differs, relative to the largest logit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from mixtron.launch.exchange.exporting import export_folder
    from mixtron.launch.exchange.importing import import_folder

    root = Path(folder)
    torch.manual_seed(1)
    config = AutoConfig.for_model(family.split()[0], **SIZES, **FAMILIES[family])
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # Biases and norms start at 0 and 1, which would hide where they go.
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    theirs.save_pretrained(root / "theirs")
    checkpoint = import_folder(root / "theirs", root / "run")
    written = export_folder(root / "run", root / "back", remote_code=False)
    back = AutoModelForCausalLM.from_pretrained(root / "back").eval()
    ids = torch.randint(0, SIZES["vocab_size"], (1, 40))
    with torch.no_grad():
        expected = theirs(ids).logits
        returned = back(ids).logits
    found = logits_of(checkpoint, ids)
    scale = expected.abs().max()
    same = all(torch.equal(a, b) for a, b in zip(theirs.parameters(), back.parameters()))  # noqa: B905
    return {
        "import": float((found - expected).abs().max() / scale),
        "export": float((returned - expected).abs().max() / scale),
        "same weights": same,
        "written": written,
    }


def logits_of(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    from mixtron.launch.inference.model import load_on_one_rank
    from mixtron.launch.spectral.runs import config_of
    from mixtron.megatron_ext.batch import make_batch
    from mixtron.megatron_ext.model import forward
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    config = config_of(checkpoint)
    chunk = load_on_one_rank(checkpoint, config)
    ranks = init_model_parallel(seed=0, device=init_distributed())
    batch = make_batch([ids.shape[1]], step=0, device="cpu")
    with torch.no_grad():
        return forward(chunk, config.model, ranks, ids, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal_both_ways(family, tmp_path):
    [found] = run_on_ranks(1, exchanged, family, str(tmp_path))
    assert found["import"] < TOLERANCE
    assert found["export"] < TOLERANCE
    assert found["same weights"]
    assert found["written"] == family.split()[0]


def exported_with_code(run: str, folder: str) -> tuple[str, float, float, list[int]]:
    """The file of the model, the error of two rows of unequal length, and a continuation."""
    from transformers import AutoModelForCausalLM

    from mixtron.launch.exchange.exporting import export_folder
    from mixtron.launch.spectral.runs import newest_checkpoint

    written = export_folder(Path(run), Path(folder), remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 600, (2, 20), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        continued = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    checkpoint = newest_checkpoint(Path(run))
    errors = []
    for row, start in ((0, 0), (1, 9)):
        expected = logits_of(checkpoint, ids[row : row + 1, start:])[0]
        errors.append(float((logits[row, start:] - expected).abs().max() / expected.abs().max()))
    return written, *errors, continued[0].tolist()


def test_any_mixer_loads_through_transformers(every_mixer_run, tmp_path, monkeypatch):
    folder = tmp_path / "exported"
    [(written, *errors, ids)] = run_on_ranks(
        1, exported_with_code, str(every_mixer_run), str(folder)
    )
    assert written == "modeling_mixtron.py"
    # Stochastic attention draws a document's order from its length alone, so rows do not matter.
    assert max(errors) < TOLERANCE
    assert len(ids) == 23
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "modeling_mixtron.py",
        "tokenizer.model",
    } or (names == {"config.json", "model.safetensors", "modeling_mixtron.py"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type 't5'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "no place for"),
    ],
)
def test_what_cannot_be_imported_is_refused(change, message, tmp_path):
    from safetensors.torch import save_file

    from mixtron.launch.exchange.families import links, read_config
    from mixtron.launch.exchange.importing import import_folder

    config = {"model_type": "llama", "rms_norm_eps": 1e-5, **SIZES}
    wanted = links("llama", *read_config("x", config))
    tensors = {name: torch.zeros(4, 4) for link in wanted for name in link.theirs}
    save_file(tensors, tmp_path / "model.safetensors")
    config |= change
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=message) as refused:
        import_folder(tmp_path, tmp_path / "run")
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "checkpoints").exists()
