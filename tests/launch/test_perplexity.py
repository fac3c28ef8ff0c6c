"""`mixtron eval perplexity`: every token once, the context it says, and sums that add up."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from mixtron.launch.inference.documents import documents_of
from mixtron.launch.inference.perplexity import Result, windows
from mixtron.launch.inference.source import find_source
from tests.data_prep.corpora import speeches
from tests.helpers.ranks import run_on_ranks


def text_of(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(Path(speeches()[0]).read_text()[:700])
    return path


def measured(run: str, text: str, settings: list[tuple[int, int]], tensor: int) -> list[Result]:
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.perplexity import perplexity

    source = find_source(Path(run), tensor=tensor)
    loaded, documents = load(source), documents_of(source, text=Path(text))
    return [perplexity(loaded, documents, *s, Console(quiet=True)) for s in settings]


def by_hand(run: str, text: str, length: int, stride: int) -> tuple[float, int]:
    """The sum of losses in nats, from whole logits, a forward a window; and how many."""
    from mixtron.launch.inference.model import load
    from mixtron.megatron_ext.batch import make_batch
    from mixtron.megatron_ext.model import forward

    source = find_source(Path(run))
    loaded = load(source)
    ids = torch.from_numpy(source.tokenizer.encode_batch([Path(text).read_text()])[0])
    total, count, target = 0.0, 0, 1
    while target < len(ids):
        last = length if target == 1 else target + stride - 1
        last = min(last, len(ids) - 1)
        first = 0 if target == 1 else target + stride - 1 - length
        batch = make_batch([last - first], step=0, device="cpu")
        with torch.no_grad():
            logits = forward(
                loaded.chunk, source.config.model, loaded.ranks, ids[None, first:last], batch
            )
        chances = logits[0].double().log_softmax(-1)
        for position in range(target, last + 1):
            total -= float(chances[position - 1 - first, ids[position]])
            count += 1
        target = last + 1
    return total, count


def test_sums_are_those_of_whole_logits(every_mixer_run, tmp_path):
    run, text = str(every_mixer_run), str(text_of(tmp_path))
    settings = [(8, 3), (32, 16), (1000, 1000)]
    (found,) = run_on_ranks(1, measured, run, text, settings[:2], 1)
    for result, setting in zip(found, settings, strict=False):
        [(nats, count)] = run_on_ranks(1, by_hand, run, text, *setting)
        assert result.tokens == count
        assert result.loss == pytest.approx(nats / count, rel=1e-6)
        assert result.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
        source = find_source(every_mixer_run)
        first = source.tokenizer.decode(
            source.tokenizer.encode_batch([Path(text).read_text()])[0][:1]
        )
        size = len(Path(text).read_bytes()) - len(first.encode())
        assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-3)
    assert found[0].tokens == found[1].tokens
    for tensor in (1, 2):
        for others in run_on_ranks(2, measured, run, text, settings[:2], tensor):
            for one, other in zip(found, others, strict=True):
                assert other.loss == pytest.approx(one.loss, rel=1e-6)


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (4, 2), (5, 3), (100, 1), (1, 1)])
def test_windows_score_every_token_once_with_enough_context(length, stride):
    sizes = [1, 2, 5, 9, 30]
    scored = [np.zeros(size, dtype=int) for size in sizes]
    for window in windows(sizes, length, stride):
        assert window.stop - window.start <= length
        targets = range(window.stop - window.scored + 1, window.stop + 1)
        for target in targets:
            scored[window.document][target] += 1
            context = target - window.start
            assert context == target or context > length - stride
    for counts in scored:
        assert counts[0] == 0
        assert (counts[1:] == 1).all()


def test_documents_are_chosen(every_mixer_run, corpus):
    from mixtron.megatron_ext.errors import ConfigError

    source = find_source(every_mixer_run)
    assert len(documents_of(source)) == 1
    shard = {"shard": corpus / "shard"}
    every, joined = documents_of(source, **shard), documents_of(source, choice="joined", **shard)
    assert len(every) == 10
    assert sum(len(d.ids) for d in every) == len(joined[0].ids)
    middle = sorted(len(d.ids) for d in every)[len(every) // 2]
    long = documents_of(source, choice="long", longest=middle, **shard)
    assert 0 < len(long) < len(every)
    assert all(len(d.ids) > middle for d in long)
    with pytest.raises(ConfigError, match="--documents joined"):
        documents_of(source, choice="long", longest=10**6)
    with pytest.raises(ConfigError, match="the run has speeches"):
        documents_of(source, name="nope")


def perplexity_command(run: str, arguments: list[str]) -> int:
    from mixtron.launch import cli
    from mixtron.launch.inference import cli as inference

    inference.end_ranks = lambda: None  # the world is the test's
    sys.argv = ["mixtron", "eval", "perplexity", run, *arguments]
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_command_writes_json_beyond_the_trained_length(every_mixer_run, tmp_path):
    output = tmp_path / "perplexity.json"
    arguments = ["--lengths", "16,31", "--text", str(text_of(tmp_path)), "--output", str(output)]
    assert run_on_ranks(1, perplexity_command, str(every_mixer_run), arguments) == [0]
    rows = json.loads(output.read_text())
    assert [(row["length"], row["stride"]) for row in rows] == [(16, 8), (31, 15)]
    refused = ["--lengths", "4,x"]
    assert run_on_ranks(1, perplexity_command, str(every_mixer_run), refused) == [2]
