"""The generators against their definitions: brute force, shuffled labels, statistics, bytes."""

import dataclasses
import hashlib
import math
import subprocess
import sys

import numpy as np
import pytest

from mixtron.launch.synthetic.draws import Draws, power_law_weights
from mixtron.launch.synthetic.task import tasks
from mixtron.megatron_ext.errors import ConfigError
from tests.launch.synthetic.solvers import solve

CASES = {
    "mqar": ({"pairs": 8, "vocab_size": 64}, 64),
    "mqar random filler": ({"pairs": 5, "vocab_size": 41, "filler": "random", "power": 1.0}, 40),
    "selective_copying": ({"copied": 6}, 50),
    "palindrome": ({"symbols": 10}, 30),
    "stack": ({"stacks": 5, "elements": 9}, 100),
    "flip_flop": ({}, 64),
    "flip_flop sparse": ({"ignore": 0.98}, 200),
    "flip_flop dense": ({"ignore": 0.1}, 64),
    "word_problem a5": ({}, 12),
    "word_problem s5": ({"group": "s5"}, 12),
    "word_problem z60": ({"group": "z60"}, 12),
    "word_problem a4xz5": ({"group": "a4xz5"}, 12),
    "mqrar": ({"variables": 6, "values": 8}, 60),
    "mqrar 3 back": ({"variables": 4, "values": 8, "n_back": 3}, 60),
    "s_niah": ({"keys": 20}, 140),
    "s_niah words": ({"haystack": "words"}, 160),
    "s_niah uuid": ({"haystack": "words", "value": "uuid"}, 200),
}
SEQUENCES = 120


def make(case: str, *, seed: int = 3, split: str = "train", indices=None):
    options, length = CASES[case]
    task = tasks()[case.split()[0]](**options)
    task.check(length, "data.synthetic")
    indices = np.arange(SEQUENCES) if indices is None else np.asarray(indices)
    return task, task.examples(seed, split, indices, length)


def test_every_task_has_a_case():
    assert {case.split()[0] for case in CASES} == set(tasks())


@pytest.mark.parametrize("case", CASES)
def test_brute_force_answers_everything(case):
    task, examples = make(case)
    answers = solve(task, examples)
    assert len(answers) == examples.mask_NT.sum() >= SEQUENCES
    assert all(answer == label for answer, label in answers)


@pytest.mark.parametrize("case", CASES)
def test_shuffled_labels_are_at_chance(case):
    """Labels of other sequences: whoever solves the task is right as often as one who guesses."""
    task, examples = make(case)
    answers, labels = np.array(solve(task, examples)).T
    generator = np.random.default_rng(0)
    hits = [(answers == generator.permutation(labels)).mean() for _ in range(40)]
    chance, n = task.chance(), len(labels)
    # Answers of one sequence are not independent, so the spread is that of the sequences.
    spread = math.sqrt(chance * (1 - chance) / SEQUENCES)
    assert abs(np.mean(hits) - chance) < 4 * spread, f"{np.mean(hits)} of {n} answers"


@pytest.mark.parametrize("case", CASES)
def test_tokens_lie_in_the_vocabulary_and_blanks_are_not_labelled(case):
    task, examples = make(case)
    for tokens in (examples.inputs_NT, examples.labels_NT):
        assert tokens.dtype == np.int64
        assert tokens.min() >= 0
        assert tokens.max() < task.vocabulary()
    assert examples.mask_NT.dtype == bool
    assert not examples.labels_NT[~examples.mask_NT].any()
    assert examples.mask_NT.any(1).all(), "a sequence that asks nothing"


@pytest.mark.parametrize("case", CASES)
def test_a_sample_is_a_function_of_its_number(case):
    _, together = make(case)
    chosen = [77, 3, 3, 0]
    _, alone = make(case, indices=chosen)
    for field in dataclasses.fields(alone):
        assert np.array_equal(getattr(alone, field.name), getattr(together, field.name)[chosen]), (
            field.name
        )


@pytest.mark.parametrize("case", CASES)
def test_seed_split_and_number_each_make_other_samples(case):
    _, reference = make(case)
    for other in (make(case, seed=4), make(case, split="validation.a")):
        same = (other[1].inputs_NT == reference.inputs_NT).all(1)
        assert not same.any()
    distinct = np.unique(reference.inputs_NT, axis=0)
    assert len(distinct) == SEQUENCES


# SHA-256 of inputs, labels and mask, the first 16 digits: the same on every machine, for ever.
HASHES = {
    "mqar": "7c80127b1e0ceecd",
    "mqar random filler": "b14ec8260aa44b53",
    "selective_copying": "85f71e504bd09e35",
    "palindrome": "f6b418f0c8992b86",
    "stack": "7937e9e38ec54e6f",
    "flip_flop": "ecd4771679cf9934",
    "flip_flop sparse": "c51cca989d6630e2",
    "flip_flop dense": "45ef03e958bcd890",
    "word_problem a5": "10c67ff6ee8489b3",
    "word_problem s5": "8f1b2e6858c7a727",
    "word_problem z60": "08b1d014151294ea",
    "word_problem a4xz5": "a1e503b10ecdc9be",
    "mqrar": "0fad16f2ed5713aa",
    "mqrar 3 back": "c8104a66675a52b7",
    "s_niah": "85d9840eb18f5045",
    "s_niah words": "f004952af488229a",
    "s_niah uuid": "2607108933fcccfe",
}


@pytest.mark.parametrize("case", CASES)
def test_same_seed_same_bytes(case):
    _, examples = make(case)
    assert digest(examples) == HASHES[case]


def digest(examples) -> str:
    parts = (examples.inputs_NT, examples.labels_NT, examples.mask_NT)
    return hashlib.sha256(b"".join(p.tobytes() for p in parts)).hexdigest()[:16]


def test_same_bytes_in_another_process_with_another_hash_seed():
    program = (
        "from tests.launch.synthetic.test_tasks import *\n"
        "print(*(digest(make(case)[1]) for case in CASES))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == list(HASHES.values())


def test_mqar_form():
    task = tasks()["mqar"](pairs=4, vocab_size=32, power=0.5)
    examples = task.examples(1, "train", np.arange(4000), 40)
    keys, values = examples.inputs_NT[:, 0:8:2], examples.inputs_NT[:, 1:8:2]
    assert keys.min() == 1
    assert keys.max() == 15
    assert values.min() == 16
    assert values.max() == 31
    for drawn in (keys, values):
        assert (np.diff(np.sort(drawn, axis=1), axis=1) > 0).all(), "a key or value twice"
    assert (examples.mask_NT.sum(1) == 4).all()
    rows, places = np.nonzero(examples.mask_NT)
    assert (places >= 8).all()
    assert (places % 2 == 0).all()
    behind = examples.inputs_NT[:, 8:][~examples.mask_NT[:, 8:]]
    assert not behind.any(), "something beside queries behind the pairs"
    # The first key's slot has the power law itself; the others' are drawn from what is left.
    first = places[examples.inputs_NT[rows, places] == keys[rows, 0]]
    expected = np.arange(1, 17) ** -0.5
    expected = 4000 * expected / expected.sum()
    assert_frequencies(np.bincount((first - 8) // 2, minlength=16), expected)


def test_selective_copying_form():
    task = tasks()["selective_copying"](copied=3, alphabet=8)
    examples = task.examples(1, "train", np.arange(3000), 23)
    context = examples.inputs_NT[:, :20]
    assert (examples.inputs_NT[:, 20:] == 7).all()
    assert ((context > 0).sum(1) == 3).all()
    assert (examples.mask_NT == (np.arange(23) >= 20)).all()
    assert_frequencies((context > 0).sum(0), np.full(20, 3 * 3000 / 20))
    counts = np.bincount(context[context > 0], minlength=7)[1:]
    assert_frequencies(counts, np.full(6, 9000 / 6))


def test_palindrome_form():
    task = tasks()["palindrome"](symbols=5)
    examples = task.examples(1, "train", np.arange(2000), 20)
    told = examples.inputs_NT[:, :10]
    assert (examples.inputs_NT[:, 10] == 0).all()
    assert np.array_equal(examples.inputs_NT[:, 11:], told[:, :0:-1])
    assert np.array_equal(examples.labels_NT[:, 10:], told[:, ::-1])
    assert_frequencies(np.bincount(told.ravel(), minlength=6)[1:], np.full(5, 20000 / 5))


def test_stack_form():
    task = tasks()["stack"](stacks=4, elements=8)
    examples = task.examples(1, "train", np.arange(500), 302)
    operations = examples.inputs_NT[:, :300].reshape(500, 100, 3)
    assert not examples.inputs_NT[:, 300:].any(), "the rest is blank"
    pops = operations[..., 0] == 2
    assert np.array_equal(examples.mask_NT[:, 1:300:3], pops)
    assert not examples.mask_NT[:, 0:300:3].any()
    assert set(np.unique(operations[..., 1])) == {11, 12, 13, 14}
    assert set(np.unique(operations[..., 2])) == set(range(3, 11))
    # Without empty stacks it would be a half; a walk that 0 reflects is there about 1 / sqrt(n).
    assert 0.40 < pops.mean() < 0.5
    assert (operations[:, 0, 0] == 1).all(), "nothing to pop at first"
    heights = np.cumsum(np.where(pops, -1, 1), axis=1)
    free = np.concatenate([np.zeros((500, 1)), heights[:, :-1]], axis=1) > 0
    share = pops[free].mean()
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(free.sum())


@pytest.mark.parametrize("ignore", [0.8, 0.98, 0.1])
def test_flip_flop_form(ignore):
    task = tasks()["flip_flop"](ignore=ignore)
    examples = task.examples(1, "train", np.arange(400), 512)
    instructions, bits = examples.inputs_NT[:, 0::2], examples.inputs_NT[:, 1::2]
    assert (instructions[:, 0] == 0).all()
    assert (instructions[:, -1] == 1).all()
    assert set(np.unique(bits)) == {3, 4}
    counts = np.bincount(instructions[:, 1:-1].ravel(), minlength=3)
    total = counts.sum()
    rest = (1 - ignore) / 2
    assert_frequencies(counts, total * np.array([rest, rest, ignore]))
    assert np.array_equal(examples.mask_NT[:, 0::2], instructions == 1)
    assert not examples.mask_NT[:, 1::2].any()
    free = bits[instructions != 1]
    assert_frequencies(np.bincount(free - 3, minlength=2), np.full(2, len(free) / 2))


@pytest.mark.parametrize(
    ("group", "order", "commutes"),
    [("a5", 60, False), ("s5", 120, False), ("a4xz5", 60, False), ("z60", 60, True)],
)
def test_word_problem_form(group, order, commutes):
    from mixtron.launch.synthetic.tasks.word_problem import multiplication_table

    table = multiplication_table(group)
    numbers = np.arange(order)
    assert table.shape == (order, order)
    assert np.array_equal(table[0], numbers), "element 0 is the identity"
    assert (np.sort(table, axis=0) == numbers[:, None]).all(), "columns are permutations"
    assert (np.sort(table, axis=1) == numbers).all(), "rows are permutations"
    assert np.array_equal(table[table[:, :, None], numbers], table[numbers[:, None, None], table])
    assert np.array_equal(table, table.T) == commutes
    # A5 is perfect: products of commutators are all of it. A4 x Z5 and Z60 are not.
    inverse = table.argmin(1)
    commutators = {
        int(table[table[g, h], table[inverse[g], inverse[h]]]) for g in numbers for h in numbers
    }
    assert len(commutators) == {"a5": 60, "s5": 60, "a4xz5": 4, "z60": 1}[group]
    task = tasks()["word_problem"](group=group)
    examples = task.examples(1, "train", np.arange(2000), 8)
    assert examples.mask_NT.all()
    for tokens in (examples.inputs_NT, examples.labels_NT):
        assert_frequencies(
            np.bincount(tokens.ravel(), minlength=order), np.full(order, 16000 / order)
        )


@pytest.mark.parametrize("n_back", [1, 2, 3])
def test_mqrar_form(n_back):
    task = tasks()["mqrar"](variables=5, values=7, n_back=n_back)
    examples = task.examples(1, "train", np.arange(1000), 80)
    variables, values = examples.inputs_NT[:, 0::2] - 7, examples.inputs_NT[:, 1::2]
    assert_frequencies(np.bincount(variables.ravel(), minlength=5), np.full(5, 8000))
    assert_frequencies(np.bincount(values.ravel(), minlength=7), np.full(7, 40000 / 7))
    earlier = np.zeros_like(variables)
    for variable in range(5):
        mine = variables == variable
        earlier[mine] = (np.cumsum(mine, axis=1) - 1)[mine]
    assert np.array_equal(examples.mask_NT[:, 0::2], earlier >= n_back)
    assert not examples.mask_NT[:, 1::2].any()


@pytest.mark.parametrize("haystack", ["noise", "words"])
def test_s_niah_form(haystack):
    from mixtron.launch.synthetic.tasks.s_niah import FIRST_KEY, IDS, SYMBOLS

    task = tasks()["s_niah"](haystack=haystack, keys=4)
    examples = task.examples(1, "train", np.arange(3000), 250)
    words = {number: word for word, number in IDS.items()} | dict(enumerate(SYMBOLS))
    text = " ".join(words.get(t, f"<{t}>") for t in examples.inputs_NT[0].tolist())
    assert text.startswith("A special magic number is hidden within the following text .")
    assert text.count("One of the special magic numbers for") == 1
    assert text.count("What is the special magic number for") == 1
    assert (examples.mask_NT == (np.arange(250) >= 243)).all()
    needles = (examples.inputs_NT == IDS[":"]).argmax(1)
    assert ((examples.inputs_NT == IDS[":"]).sum(1) == 1).all()
    before = examples.inputs_NT[np.arange(3000), needles - 10]
    assert (before == IDS["."]).all(), "the needle does not stand between sentences"
    keys = examples.inputs_NT[np.arange(3000), needles - 2] - FIRST_KEY
    assert_frequencies(np.bincount(keys, minlength=4), np.full(4, 750))
    assert (examples.labels_NT[:, 243] > 0).all(), "numbers have seven digits"
    digits = np.bincount(examples.labels_NT[:, 244:].ravel(), minlength=10)
    assert_frequencies(digits, np.full(10, 1800))
    places = np.unique(needles)
    assert len(places) >= 8
    first, last = 24 + 10 - 1, 250
    assert places[0] <= first + 10
    assert places[-1] > last - 70, "never deep"


def test_uuids_are_version_4():
    task = tasks()["s_niah"](value="uuid", haystack="words")
    examples = task.examples(1, "train", np.arange(50), 220)
    whole = np.concatenate([examples.inputs_NT, examples.labels_NT[:, -1:]], axis=1)[:, -36:]
    symbols = "0123456789abcdef-"
    for row in whole:
        text = "".join(symbols[digit] for digit in row)
        assert [len(part) for part in text.split("-")] == [8, 4, 4, 4, 12]
        assert text[14] == "4"
        assert text[19] in "89ab"
    assert (examples.mask_NT.sum(1) == 30).all()


def test_a_mixture_takes_each_value_as_often():
    task = tasks()["mqar"](pairs=[1, 2, 4], vocab_size=32)
    examples = task.examples(1, "train", np.arange(3000), 32)
    pairs = examples.mask_NT.sum(1)
    assert_frequencies(np.bincount(pairs, minlength=5)[[1, 2, 4]], np.full(3, 1000))
    for row in np.random.default_rng(0).choice(3000, 50):
        plain = task.model_copy(update={"pairs": [int(pairs[row])]})
        one = dataclasses.replace(
            examples,
            **{f.name: getattr(examples, f.name)[[row]] for f in dataclasses.fields(examples)},
        )
        assert all(answer == label for answer, label in solve(plain, one))


@pytest.mark.parametrize(
    ("task", "options", "length", "message"),
    [
        ("mqar", {"pairs": [4, 9]}, 32, "pairs=9 need 36 tokens; pairs up to 8 fit"),
        ("mqar", {}, 33, "the length must be even; nearest: 32, 34"),
        ("mqar", {"vocab_size": 8, "pairs": 4}, 32, "vocab_size=8 has 3 keys for pairs=4"),
        ("selective_copying", {}, 31, "copied=16 needs 32 tokens; copied up to 15 fits"),
        ("palindrome", {}, 7, "the length must be even"),
        ("stack", {}, 5, "at least 6 tokens"),
        ("flip_flop", {}, 7, "the length must be even and at least 4"),
        ("mqrar", {"variables": 4, "n_back": 2}, 16, "at least 18 tokens"),
        ("s_niah", {}, 50, "tokens are needed"),
    ],
)
def test_a_length_that_cannot_be_is_refused(task, options, length, message):
    with pytest.raises(ConfigError) as caught:
        tasks()[task](**options).check(length, "data.synthetic")
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"data.synthetic: {task} at length {length}: ")
    assert message in str(caught.value)


def test_the_shortest_haystack_fits():
    for value in ("number", "uuid"):
        task = tasks()["s_niah"](value=value)
        message = task.misfit(1)
        assert message is not None
        shortest = int(message.split()[2])
        assert task.misfit(shortest) is None
        examples = task.examples(1, "train", np.arange(20), shortest)
        assert all(answer == label for answer, label in solve(task, examples))


def test_draws_are_uniform():
    draws = Draws(5, np.arange(2000))
    assert_frequencies(np.bincount(draws.integers(0, 10, 20).ravel()), np.full(10, 4000))
    mean = draws.uniform(50).mean()
    assert abs(mean - 0.5) < 4 / math.sqrt(12 * 100_000)
    chosen = draws.distinct(3, 7, 2)
    assert_frequencies(np.bincount(chosen[:, 0] * 4 + chosen[:, 1] - 15)[[1, 2, 3, 4]], None)
    assert (chosen[:, 0] != chosen[:, 1]).all()


def test_weighted_draws_without_repetition():
    weights = power_law_weights(3, -1.0)
    drawn = Draws(5, np.arange(6000)).weighted_distinct(weights, 2)
    p = weights / weights.sum()
    expected = {(i, j): p[i] * p[j] / (1 - p[i]) for i in range(3) for j in range(3) if i != j}
    found = {pair: int((drawn == pair).all(1).sum()) for pair in expected}
    assert_frequencies(list(found.values()), 6000 * np.array(list(expected.values())))


def assert_frequencies(counts, expected) -> None:
    """Counts of independent draws: chi-squared within five deviations of its mean."""
    counts = np.asarray(counts, dtype=float)
    expected = np.full(len(counts), counts.mean()) if expected is None else np.asarray(expected)
    degrees = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < degrees + 5 * math.sqrt(2 * degrees), f"{counts} for {expected}"
