"""Which models `bench step` and `bench peer` set another library's beside."""

from pathlib import Path

import pytest

from mixtron.launch.bench import peer
from mixtron.launch.config import load_config
from mixtron.megatron_ext.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("kla_400m", "kla"),
        ("path_400m", "path"),
        ("attention_400m", "softmax_attention"),
        ("sa_swa_400m", None),
        ("hybrid_1b", None),
    ],
)
def test_models_of_one_known_mixer_have_a_peer(config, kind):
    assert peer.kind_of(load_config(CONFIGS / f"{config}.yaml")) == kind


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    assert peer.missing("kla") == "transformers"
    found = {"transformers": object()}
    monkeypatch.setattr(peer.importlib.util, "find_spec", found.get)
    assert peer.missing("path") == "fla"
    assert peer.missing("softmax_attention") is None
    with pytest.raises(ConfigError, match="fla PaTHAttention: fla is missing"):
        peer.bench_peer(load_config(CONFIGS / "path_400m.yaml"), steps=1, warm_up=1)


def test_a_model_without_a_peer_is_refused():
    with pytest.raises(ConfigError, match="no peer"):
        peer.bench_peer(load_config(CONFIGS / "sa_swa_400m.yaml"), steps=1, warm_up=1)
