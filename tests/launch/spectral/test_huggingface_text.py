"""`mixtron spectral FOLDER --text`: forwards of Hugging Face families, and what is told of them."""

import json

import pytest
import torch
from typer.testing import CliRunner

from mixtron.launch.spectral.cli import app
from mixtron.launch.spectral.huggingface_text import attention_inputs, text_ids
from mixtron.launch.spectral.sequences import measure_text
from mixtron.launch.spectral.weights import SpectralError
from tests.launch.spectral.test_spectral import dense
from tests.launch.spectral.whole_models import LAYERS, TEXT, WHOLE, H, K, write_whole

LAST_LAYER = {
    "gpt2": (96.9435, -1.01987, 2.60376),
    "bert": (442.1947, -0.58544, 4.00512),
    "gpt_neox": (168.0121, 3.50052, -0.55708),
    "llama": (-280.567, 1.36255, -0.26027),
    "mistral": (-280.567, 1.36255, -0.26027),
    "qwen2": (-65.0693, 2.2558, 2.53314),
    "qwen3": (-20.2995, -1.58149, -1.01706),
}
"""By transformers 5.24.0 with torch 2.11.0, of the same folders: the sum of q k, and an entry of q
and of k. All layers agreed to a relative 5e-7."""


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("family", WHOLE)
def test_the_last_layers_inputs_are_those_of_transformers(family, tmp_path, text):
    folder = write_whole(family, tmp_path / "model")
    layers = list(attention_inputs(folder, text_ids(folder, text, 100)))
    assert len(layers) == LAYERS
    q_HTK, k_HTK = layers[-1]
    assert q_HTK.shape == k_HTK.shape == (H, len(TEXT.split()), K)
    found = (float((q_HTK * k_HTK).sum()), float(q_HTK[1, 5, 3]), float(k_HTK[2, 13, 6]))
    assert found == pytest.approx(LAST_LAYER[family], rel=1e-4)


def test_spectra_over_a_text_equal_dense_numpy(tmp_path, text):
    folder = write_whole("llama", tmp_path / "model")
    spectra = measure_text(folder, text, 9)
    assert spectra.family == "llama"
    for layer, (q_HTK, k_HTK) in enumerate(attention_inputs(folder, text_ids(folder, text, 9))):
        for h, head in enumerate(spectra.heads[layer]):
            scores_TT = (q_HTK[h].double() @ k_HTK[h].double().T * K**-0.5).numpy()
            expected = dense(scores_TT, K)
            for name in ("routing_share", "routing_rank", "filtering_rank", "largest_real"):
                assert getattr(head, name) == pytest.approx(expected[name], rel=1e-6), name


def test_the_command_writes_weights_and_text(tmp_path, text):
    folder = write_whole("gpt2", tmp_path / "model")
    out = tmp_path / "out"
    result = CliRunner().invoke(app, [str(folder), "--output", str(out), "--text", str(text)])
    assert result.exit_code == 0, result.output
    found = json.loads((out / "text/spectral.json").read_text())
    assert [len(layer["heads"]) for layer in found["layers"]] == [H] * LAYERS
    assert (out / "text/cascade.png").exists()
    assert (out / "spectral.json").exists()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"activation_function": "swish9"}, "activation 'swish9': known are gelu"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling 'llama3'"),
        ("mistral", {"sliding_window": 8}, "14 tokens: the model's sliding_window is 8"),
    ],
)
def test_what_is_not_known_is_named(family, change, message, tmp_path, text):
    folder = write_whole(family, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SpectralError, match=message):
        measure_text(folder, text, 100)


def test_a_text_needs_the_models_tokenizer_and_must_fit(tmp_path, text):
    folder = write_whole("bert", tmp_path / "model")
    text.write_text(f"{TEXT} {TEXT}")
    with pytest.raises(SpectralError, match="28 tokens: the model's table of positions is 16"):
        measure_text(folder, text, 100)
    text.write_text("a")
    with pytest.raises(SpectralError, match="1 tokens; at least 2"):
        measure_text(folder, text, 100)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SpectralError, match=r"tokenizer.json: not there"):
        measure_text(folder, text, 100)
    assert torch.is_grad_enabled()
