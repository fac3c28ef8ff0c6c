"""Stochastic attention in the place of an imported model's own, without training."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_on_ranks

TOKENS = 32
WINDOWS = {"sa": (3, 15, 47, 2 * TOKENS - 1), "swa": (3, 7, 15, TOKENS)}
"""The last reaches every token: SA's is two-sided."""


def divergences(folder: str, paths: str) -> list[float]:
    """Mean KL of the next token from full attention's, for each window."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from mixtron.launch.exchange.importing import import_folder
    from mixtron.launch.inference.model import load_on_one_rank
    from mixtron.launch.inference.source import with_mixers
    from mixtron.launch.spectral.runs import config_of
    from mixtron.megatron_ext.batch import make_batch
    from mixtron.megatron_ext.model import forward
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101}
    config = Qwen3Config(**sizes, **heads, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(Path(folder) / "theirs")
    checkpoint = import_folder(Path(folder) / "theirs", Path(folder) / "run")
    full = config_of(checkpoint)
    ids = torch.randint(0, 101, (1, TOKENS))

    def chances(config) -> torch.Tensor:
        chunk = load_on_one_rank(checkpoint, config)
        ranks = init_model_parallel(seed=0, device=init_distributed())
        batch = make_batch([TOKENS], step=0, device="cpu")
        with torch.no_grad():
            return forward(chunk, config.model, ranks, ids, batch)[0].double().log_softmax(-1)

    expected = chances(full)
    found = []
    for window in WINDOWS[paths]:
        change = f"attention={{type: stochastic, paths: {paths}, window: {window}}}"
        replaced = with_mixers(full, [change])
        assert replaced.mixers["attention"].qk_norm
        kl = (expected.exp() * (expected - chances(replaced))).sum(-1).mean()
        found.append(float(kl))
    return found


@pytest.mark.parametrize("paths", ["sa", "swa"])
def test_agreement_rises_with_the_window_up_to_equality(paths, tmp_path):
    [found] = run_on_ranks(1, divergences, str(tmp_path), paths)
    # A window that reaches every token; fp32 sums in another order.
    assert abs(found[-1]) < 1e-9
    assert all(wider < narrower for narrower, wider in pairwise(found))
    assert found[0] > 0.01


def test_weights_that_do_not_fit_are_refused(every_mixer_run):
    [(code, message)] = run_on_ranks(1, refusal, str(every_mixer_run))
    assert code == 2
    assert "self_attention.in_proj.weight.sa_gate" in message
    assert "\n" not in message


def refusal(run: str) -> tuple[int, str]:
    from mixtron.launch.checkpoint_files import CheckpointError
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.source import find_source

    change = "attention={type: stochastic, paths: sa+swa, window: 8}"
    try:
        load(find_source(Path(run), override_mixers=[change]))
    except CheckpointError as error:
        return error.exit_code, str(error)
    return 0, "loaded"
