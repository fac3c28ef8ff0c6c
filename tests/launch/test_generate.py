"""`mixtron generate`: batches, seeds, tensor parallelism, streaming, refusals."""

import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from mixtron.launch.inference.sampling import Sampling
from tests.data_prep.corpora import speeches
from tests.helpers.ranks import run_on_ranks

PROMPTS = ["The", "The people of the States", "I have"]
GREEDY = {"temperature": 0.0}


def continued(
    run: str, prompts: list[str], sampling: dict, tensor: int = 1, tokens: int = 10
) -> tuple[list[str], list[str]]:
    """The texts, and everything that was given out, in order; the first two prompts are packed."""
    from mixtron.launch.inference import decoding
    from mixtron.launch.inference.generate import Request, generate
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.source import find_source

    given: list[str] = []
    loaded = load(find_source(Path(run), tensor=tensor))
    request = Request(prompts, tokens, Sampling(**sampling))
    first_two = sum(map(len, request.ids(loaded.source)[:2]))
    with patch.object(decoding, "PREFILL_TOKENS", first_two):
        texts = generate(loaded, request, given.append)
    return texts, given


def greedy_by_full_forward(run: str, prompt: str, tokens: int) -> str:
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.source import find_source
    from mixtron.megatron_ext.batch import make_batch
    from mixtron.megatron_ext.model import forward

    loaded = load(find_source(Path(run)))
    source = loaded.source
    ids = source.tokenizer.encode_batch([prompt])[0].tolist()
    # The random windows of decoding are those of a document of the decoding's capacity.
    longest = source.config.mixers["gated_sa"].decode_capacity
    for _ in range(tokens):
        filled = torch.tensor([ids + [0] * (longest - len(ids))])
        batch = make_batch([longest], step=0, device="cpu")
        with torch.no_grad():
            logits = forward(loaded.chunk, source.config.model, loaded.ranks, filled, batch)
        ids.append(int(logits[0, len(ids) - 1].argmax()))
    return source.tokenizer.decode(ids)


def test_a_batch_says_what_each_prompt_alone_does(every_mixer_run):
    run = str(every_mixer_run)
    [(together, given)] = run_on_ranks(1, continued, run, PROMPTS, GREEDY)
    alone = [run_on_ranks(1, continued, run, [p], GREEDY)[0] for p in PROMPTS]
    assert together == [texts[0] for texts, _ in alone]
    assert given == [f"--- {i} of 3\n{text}\n" for i, text in enumerate(together, start=1)]
    for text, (_, pieces) in zip(together, alone, strict=True):
        assert "".join(pieces) == text + "\n"
        assert sum(piece != "" for piece in pieces) > 5
    [expected] = run_on_ranks(1, greedy_by_full_forward, run, PROMPTS[1], 10)
    assert together[1] == expected


def test_two_tensor_ranks_draw_what_one_does_and_seeds_repeat(every_mixer_run):
    run, warm = str(every_mixer_run), {"temperature": 1.0, "top_p": 0.9, "top_k": 50}
    [(one, _)] = run_on_ranks(1, continued, run, PROMPTS, warm)
    (two, _), (other, _) = run_on_ranks(2, continued, run, PROMPTS, warm, 2)
    assert one == two == other
    [(alone, _)] = run_on_ranks(1, continued, run, PROMPTS[:1], warm)
    assert alone == one[:1]
    [(another, _)] = run_on_ranks(1, continued, run, PROMPTS, warm | {"seed": 1})
    assert all(a != b for a, b in zip(one, another, strict=True))


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.7), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.5), {0}),
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
        (Sampling(temperature=0.05), {0}),
        (Sampling(temperature=0.0), {0}),
    ],
    ids=["top-k", "top-p", "top-p of the first", "all", "cold", "greedy"],
)
def test_sampling_draws_only_what_is_allowed(sampling, allowed):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = sampling.generator(0)
    drawn = [sampling.draw(logits, generator) for _ in range(400)]
    assert set(drawn) == allowed
    if len(allowed) == 4:
        shares = torch.bincount(torch.tensor(drawn)) / len(drawn)
        assert (shares - logits.exp()).abs().max() < 0.08


def refused(capsys, monkeypatch, *arguments: object) -> str:
    """What `mixtron generate` says when it refuses: one line."""
    from mixtron.launch import cli

    monkeypatch.setattr(sys, "argv", ["mixtron", "generate", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    return line


def test_what_cannot_be_continued_is_refused(every_mixer_run, tmp_path, capsys, monkeypatch):
    def say(*arguments):
        return refused(capsys, monkeypatch, *arguments)

    run = every_mixer_run
    long = "The people " * 20
    assert "longer than the 32 that this model" in say(run, "--prompt", long)
    assert "prompt 2 is empty" in say(run, "--tokens", 4, "--prompt", "I", "--prompt", "")
    assert "nothing to continue" in say(run)
    assert "neither a run folder" in say(tmp_path, "--prompt", "I")
    assert "no mixer 'nope'" in say(run, "--prompt", "I", "--override-mixer", "nope={}")
    assert "window" in say(run, "--prompt", "I", "--override-mixer", "attention={window: 0}")

    from mixtron.data_prep.tokenizer import train_tokenizer

    other = tmp_path / "other.model"
    train_tokenizer(speeches()[:3], 700, "bpe", other, progress=False)
    assert "another tokenizer" in say(run, "--prompt", "I", "--tokenizer", other)


def test_a_token_without_an_embedding_is_refused(every_mixer_run):
    import dataclasses

    from mixtron.launch.inference.decoding import check_prompts
    from mixtron.launch.inference.source import find_source
    from mixtron.megatron_ext.errors import ConfigError

    source = find_source(every_mixer_run)
    model = source.config.model.model_copy(update={"vocab_size": 300})
    small = dataclasses.replace(source, config=source.config.model_copy(update={"model": model}))
    with pytest.raises(ConfigError, match=r"prompt 2: token 450 \('.+'\) is outside .* of 300"):
        check_prompts(small, [[5], [7, 450]], 4)


def test_a_run_folder_that_was_moved_brings_its_tokenizer(every_mixer_run, tmp_path):
    from mixtron.launch.inference.source import find_source

    moved = tmp_path / "moved"
    shutil.copytree(every_mixer_run, moved)
    assert find_source(moved).tokenizer.vocab_size == 600
    assert find_source(moved / "checkpoints" / "step_00000006").checkpoint.parent.parent == moved
