import json
import subprocess
import sys

import numpy as np
import pytest

from mixtron.data_prep.build import build
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer import load_tokenizer, train_tokenizer
from mixtron.launch.config_sections import DataConfig
from mixtron.launch.data import (
    TrainingData,
    ValidationData,
    check_against_tokenizer,
    check_vocabulary,
    compare_records,
)
from mixtron.launch.sample_order import document_runs
from mixtron.launch.sample_stream import SampleStream, Split, splits_of
from tests.data_prep.corpora import speeches, write_shard

EOD = 99
LENGTH = 8


def random_documents(count: int, seed: int = 0) -> list[list[int]]:
    """Documents of 1 to 20 tokens, the last of which is EOD; EOD also occurs inside them."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 20, count)
    return [[*generator.integers(90, 100, size).tolist(), EOD] for size in sizes]


def config(tmp_path, train=("a",), **values) -> DataConfig:
    sources = [
        {"path": str(tmp_path / s)}
        if isinstance(s, str)
        else {**s, "path": str(tmp_path / s["path"])}
        for s in train
    ]
    base = {"sequence_length": LENGTH, "tokenizer": "t.model", "seed": 5, "train": sources}
    return DataConfig.model_validate(base | values)


def expected_samples(documents: list[list[int]]) -> list[tuple[list[int], list[int], list[bool]]]:
    """Tokens, starts and mask of every sample, token by token."""
    stream = [token for document in documents for token in document]
    begins = [i == 0 for document in documents for i in range(len(document))]
    samples = []
    for first in range(0, len(stream) - LENGTH, LENGTH):
        starts = [i for i in range(LENGTH) if i == 0 or begins[first + i]]
        mask = [not begins[first + i + 1] for i in range(LENGTH)]
        samples.append((stream[first : first + LENGTH + 1], starts, mask))
    return samples


def unpack(sample) -> tuple[list[int], list[int], list[bool]]:
    assert sample.tokens.dtype == sample.document_starts.dtype == np.int64
    assert sample.label_mask.dtype == bool
    return sample.tokens.tolist(), sample.document_starts.tolist(), sample.label_mask.tolist()


def test_samples_of_a_whole_shard(tmp_path):
    documents = random_documents(60)
    write_shard(tmp_path / "a", documents, eod_id=EOD)
    stream = SampleStream(Shard(tmp_path / "a"), None, LENGTH)
    assert [unpack(stream[i]) for i in range(len(stream))] == expected_samples(documents)
    with pytest.raises(IndexError):
        stream[len(stream)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_samples_of_splits(tmp_path, share):
    documents = random_documents(300, seed=1)
    write_shard(tmp_path / "a", documents, eod_id=EOD)
    shard = Shard(tmp_path / "a")
    splits = splits_of({"train": share, "valid": 1 - share})
    parts = []
    for split in splits.values():
        stream = SampleStream(shard, split, LENGTH)
        chosen = np.concatenate(
            [np.arange(*run) for run in document_runs(300, split.start, split.stop)]
        )
        parts.append(chosen)
        expected = expected_samples([documents[i] for i in chosen])
        assert [unpack(stream[i]) for i in range(len(stream))] == expected
        assert stream.documents == len(chosen)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(300))


def test_too_little_for_one_sample(tmp_path):
    write_shard(tmp_path / "a", [[1, 2, 3]] * 10)
    shard = Shard(tmp_path / "a")
    assert len(SampleStream(shard, None, 29)) == 1
    with pytest.raises(
        DataError, match=r"holds 10 documents with 30 tokens, .* needs 31"
    ) as caught:
        SampleStream(shard, None, 30)
    assert caught.value.exit_code == 2
    # 10 documents, one per cent of which is none: the peers loop for ever here.
    with pytest.raises(DataError, match="split 'test' holds 0 documents with 0 tokens"):
        SampleStream(shard, Split("test", 0.0, 1e-6), LENGTH)


def test_every_epoch_sees_every_sample_once_and_in_another_order(tmp_path):
    write_shard(tmp_path / "a", random_documents(100))
    data = TrainingData.open(config(tmp_path))
    n = len(data.sources[0].stream)
    order = data.next(n * 5 // 2)
    first, second = order[:n], order[n : 2 * n]
    assert sorted(first) == sorted(second) == [(0, i) for i in range(n)]
    assert first != second
    assert len(set(order[2 * n :])) == n * 5 // 2 - 2 * n


def test_order_does_not_depend_on_batches_or_run_length(tmp_path):
    write_shard(tmp_path / "a", random_documents(100))
    write_shard(tmp_path / "b", random_documents(50, seed=2))
    both = ({"path": "a", "weight": 0.7}, {"path": "b", "weight": 0.3})
    longest = TrainingData.open(config(tmp_path, both)).next(900)
    for size in (1, 7, 64, 450):
        data = TrainingData.open(config(tmp_path, both))
        batches = [data.next(size) for _ in range(900 // size)]
        order = [reference for batch in batches for reference in batch]
        assert order == longest[: len(order)]


@pytest.mark.parametrize("stop", [0, 1, 37, 100, 263])
def test_resuming_equals_going_on(tmp_path, stop):
    write_shard(tmp_path / "a", random_documents(100))
    write_shard(tmp_path / "b", random_documents(50, seed=2))
    both = ({"path": "a", "weight": 3}, {"path": "b", "weight": 1})
    straight = TrainingData.open(config(tmp_path, both))
    before, after = straight.next(stop), straight.next(400)

    killed = TrainingData.open(config(tmp_path, both))
    assert killed.next(stop) == before
    state = json.loads(json.dumps(killed.state_dict()))
    killed.next(50)  # planned but not saved: to be done again
    resumed = TrainingData.open(config(tmp_path, both))
    resumed.load_state_dict(state)
    assert resumed.next(400) == after
    assert resumed.state_dict() == straight.state_dict()


def test_stopping_exactly_at_the_end_of_an_epoch(tmp_path):
    write_shard(tmp_path / "a", random_documents(100))
    straight = TrainingData.open(config(tmp_path))
    n = len(straight.sources[0].stream)
    straight.next(n)
    resumed = TrainingData.open(config(tmp_path))
    resumed.load_state_dict(straight.state_dict())
    second, third = resumed.next(n), resumed.next(n)
    assert second == straight.next(n)
    assert sorted(second) == sorted(third) == [(0, i) for i in range(n)]


def test_reading_counts_nothing(tmp_path):
    write_shard(tmp_path / "a", random_documents(30))
    data = TrainingData.open(config(tmp_path))
    plan = data.next(4)
    state = data.state_dict()
    for reference in plan * 3:
        data.read(reference)
    assert data.state_dict() == state


def test_a_global_batch_is_the_same_for_any_number_of_data_ranks(tmp_path):
    """Two ranks for four steps, then one: as the loop does it, each rank reads its own share."""
    write_shard(tmp_path / "a", random_documents(100))

    def steps(state: dict | None, ranks: int, count: int) -> tuple[list, dict]:
        data = [TrainingData.open(config(tmp_path)) for _ in range(ranks)]
        batches = []
        for rank_data in data:
            if state is not None:
                rank_data.load_state_dict(state)
        for _ in range(count):
            plans = [rank_data.next(6) for rank_data in data]
            read = [
                unpack(data[rank].read(reference))
                for rank in range(ranks)
                for reference in plans[rank][rank::ranks]
            ]
            batches.append(sorted(read))
        assert all(rank_data.state_dict() == data[0].state_dict() for rank_data in data)
        return batches, data[0].state_dict()

    straight, _ = steps(None, 2, 8)
    first, state = steps(None, 2, 4)
    second, _ = steps(state, 1, 4)
    third, _ = steps(state, 3, 4)
    assert first + second == first + third == straight


def test_other_weights_continue_each_source(tmp_path):
    write_shard(tmp_path / "a", random_documents(200))
    write_shard(tmp_path / "b", random_documents(200, seed=2))

    def opened(a: float, b: float) -> TrainingData:
        both = ({"path": "a", "weight": a}, {"path": "b", "weight": b})
        return TrainingData.open(config(tmp_path, both))

    data = opened(0.5, 0.5)
    plan = data.next(100)
    changed = opened(0.2, 0.8)
    changed.load_state_dict(data.state_dict())
    assert changed.realised_shares() == {}
    plan += changed.next(100)
    assert changed.realised_shares() == {"data/share.train.0": 0.2, "data/share.train.1": 0.8}
    for source, count in ((0, 50 + 20), (1, 50 + 80)):
        alone = TrainingData.open(config(tmp_path, ("ab"[source],)))
        mine = [sample for number, sample in plan if number == source]
        assert mine == [sample for _, sample in alone.next(count)]
    assert compare_records(data.record(), changed.record()) == [
        f"{tmp_path}/a: its share of the blend was 0.5, is 0.2; it continues its own order",
        f"{tmp_path}/b: its share of the blend was 0.5, is 0.8; it continues its own order",
    ]
    assert compare_records(data.record(), opened(3, 3).record()) == []


def test_sources_are_known_by_content(tmp_path):
    """Reordered, renamed and added sources: each known one continues."""
    for name in "abc":
        write_shard(tmp_path / name, random_documents(100, seed=ord(name)))
    data = TrainingData.open(config(tmp_path, ("a", "b")))
    data.next(60)
    for suffix in ("bin", "idx", "json"):
        (tmp_path / f"a.{suffix}").rename(tmp_path / f"moved.{suffix}")
    other = TrainingData.open(config(tmp_path, ("c", "b", "moved")))
    other.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert [source.consumed for source in other.sources] == [0, 30, 30]
    differences = compare_records(data.record(), other.record())
    assert len(differences) == 3
    assert differences[0].startswith(f"{tmp_path}/c: new in the blend (fingerprint ")
    assert differences[1].startswith(f"{tmp_path}/b: its share of the blend was 0.5, is 0.333")
    assert differences[2].startswith(f"{tmp_path}/moved: its share")
    assert (
        compare_records(other.record(), data.record())[-1]
        == f"{tmp_path}/c: no longer in the blend"
    )


def test_moved_files_are_no_difference_and_a_changed_token_is(tmp_path):
    documents = random_documents(40)
    write_shard(tmp_path / "a", documents)
    saved = json.loads(json.dumps(TrainingData.open(config(tmp_path)).record()))
    (tmp_path / "moved").mkdir()
    for suffix in ("bin", "idx", "json"):
        (tmp_path / f"a.{suffix}").rename(tmp_path / "moved" / f"a.{suffix}")
    moved = TrainingData.open(config(tmp_path, ("moved/a",)))
    assert compare_records(saved, moved.record()) == []

    write_shard(tmp_path / "a", [[1, *documents[0][1:]], *documents[1:]])
    changed = TrainingData.open(config(tmp_path))
    (difference,) = compare_records(saved, changed.record())
    assert difference.startswith(f"{tmp_path}/a: another content (fingerprint was ")


def test_other_settings_of_the_order_are_differences(tmp_path):
    write_shard(tmp_path / "a", random_documents(100))

    def record(**values) -> dict:
        fractions = values.pop("split", {"train": 0.8, "valid": 0.2})
        source = {"path": "a", "split": "train"}
        return TrainingData.open(config(tmp_path, (source,), split=fractions, **values)).record()

    saved = json.loads(json.dumps(record()))
    assert compare_records(saved, record()) == []
    assert compare_records(saved, record(split={"train": 0.8, "valid": 0.1, "test": 0.1})) == []
    (difference,) = compare_records(saved, record(split={"train": 0.7, "valid": 0.2}))
    assert difference.startswith(f"{tmp_path}/a (split train): another range of documents")
    (difference,) = compare_records(saved, record(seed=6))
    assert difference.startswith("data.seed was 5, is 6")
    (difference,) = compare_records(saved, record(sequence_length=9))
    assert difference.startswith("data.sequence_length was 8, is 9")


def test_another_seed_begins_the_order_anew(tmp_path):
    write_shard(tmp_path / "a", random_documents(100))
    data = TrainingData.open(config(tmp_path))
    data.next(10)
    other = TrainingData.open(config(tmp_path, seed=6))
    other.load_state_dict(data.state_dict())
    assert other.next(50) == TrainingData.open(config(tmp_path, seed=6)).next(50)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_mean_nothing(tmp_path, weight):
    write_shard(tmp_path / "a", random_documents(10))
    write_shard(tmp_path / "b", random_documents(10, seed=2))
    streams = [SampleStream(Shard(tmp_path / name), None, LENGTH) for name in "ab"]
    with pytest.raises(DataError, match=rf"data\.train\.1: weight {weight} of .*/b"):
        TrainingData([(streams[0], 1.0), (streams[1], weight)], seed=0)


def test_the_same_content_twice_is_refused(tmp_path):
    for name in "ab":
        write_shard(tmp_path / name, random_documents(100))
    with pytest.raises(DataError, match=r"data\.train\.1: .*/b has the same content .*train\.0"):
        TrainingData.open(config(tmp_path, ("a", "b")))
    parts = ({"path": "a", "split": "x"}, {"path": "b", "split": "y"})
    TrainingData.open(config(tmp_path, parts, split={"x": 0.5, "y": 0.5}))


def test_validation_is_the_first_samples_in_file_order(tmp_path):
    documents = random_documents(100)
    write_shard(tmp_path / "a", documents)
    sets = {
        "all": {"path": str(tmp_path / "a")},
        "few": {"path": str(tmp_path / "a"), "sequences": 3},
    }
    validation = ValidationData.open_all(config(tmp_path, validation=sets))
    expected = expected_samples(documents)
    assert [unpack(validation["all"].read(i)) for i in range(len(validation["all"]))] == expected
    assert [unpack(validation["few"].read(i)) for i in range(len(validation["few"]))] == expected[
        :3
    ]
    with pytest.raises(IndexError):
        validation["few"].read(3)
    sets["few"]["sequences"] = len(expected) + 1
    message = (
        rf"data\.validation\.few: sequences={len(expected) + 1}, .* has {len(expected)} samples"
    )
    with pytest.raises(DataError, match=message):
        ValidationData.open_all(config(tmp_path, validation=sets))


def test_validation_documents_are_never_trained_on(tmp_path):
    """Each document repeats its own number, so that a token says where it comes from."""
    write_shard(tmp_path / "a", [[i] * 12 for i in range(400)], cardinality=400)
    source = {"path": str(tmp_path / "a"), "split": "valid"}
    opened = config(
        tmp_path,
        ({"path": "a", "split": "train"},),
        split={"train": 0.9, "valid": 0.1},
        validation={"v": source},
    )
    data, validation = TrainingData.open(opened), ValidationData.open_all(opened)["v"]
    trained = {
        int(token)
        for reference in data.next(len(data.sources[0].stream))
        for token in data.read(reference).tokens
    }
    held_out = {int(t) for i in range(len(validation)) for t in validation.read(i).tokens}
    assert trained.isdisjoint(held_out)
    assert len(trained | held_out) > 396


def test_real_text_and_its_tokenizer(tmp_path):
    for name, size in (("t", 500), ("other", 520)):
        train_tokenizer(speeches()[:3], size, "bpe", tmp_path / f"{name}.model", progress=False)
    tokenizer = load_tokenizer(tmp_path / "t.model")
    build(speeches()[:3], tmp_path / "t.model", tmp_path / "a", progress=False)
    data = TrainingData.open(config(tmp_path, sequence_length=64))
    stream = data.sources[0].stream
    text = "".join(tokenizer.decode(stream[i].tokens[:-1]) for i in range(3))
    start = speeches()[0].read_text()[:100]
    assert text.replace(" ", "").startswith(start.replace(" ", ""))

    check_against_tokenizer(data.shards, tokenizer)
    check_vocabulary(data.shards, 500)
    with pytest.raises(DataError, match=r"/a: built with a sentencepiece tokenizer of 500 ids"):
        check_against_tokenizer(data.shards, load_tokenizer(tmp_path / "other.model"))
    largest = data.shards[0].manifest.max_id
    check_vocabulary(data.shards, largest + 1)
    with pytest.raises(DataError, match=rf"holds id {largest}, but model\.vocab_size={largest}"):
        check_vocabulary(data.shards, largest)


def test_a_missing_shard_or_split_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.bin: no such file"):
        TrainingData.open(config(tmp_path, ("absent",)))


def test_importing_the_reader_needs_neither_torch_nor_megatron():
    code = (
        "import sys, mixtron.launch.data;"
        "print([name for name in sys.modules if name in ('torch', 'megatron')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
