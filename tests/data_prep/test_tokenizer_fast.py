"""gigatoken and tiktoken (the `fast` extra) against the plain tokenizers."""

import base64
import json
import random

import numpy as np
import psutil
import pytest
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mixtron.data_prep import unit
from mixtron.data_prep.build import build_all
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.plan import Recipe, make_plan
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.data_prep.tokenizer_fast import GigatokenTokenizer
from mixtron.data_prep.tokenizer_training import train_tokenizer
from tests.data_prep.corpora import speeches, write_jsonl

CL100K_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RANGES = [
    (0x00, 0x7F),
    (0x80, 0x24F),
    (0x300, 0x36F),
    (0x400, 0x52F),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0x2000, 0x206F),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xE000, 0xF8FF),
    (0xFE00, 0xFE0F),
    (0xA640, 0xA7FF),
    (0x10900, 0x11FFF),
    (0x16A00, 0x18FFF),
    (0x1E000, 0x1EFFF),
    (0x1F300, 0x1FAFF),
    (0x2B700, 0x334FF),
    (0x10000, 0x10FFFF),
]
PIECES = [
    "<|endoftext|>",
    "</s>",
    "<s>",
    "<unk>",
    "\r\n",
    "  ",
    "\0",
    "\u2028",
    "don't",
    " \u00a0 ",
]


def random_texts(count: int, seed: int) -> list[str]:
    """Strings of every script, control characters, special tokens and repeated runs."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(generator.randint(1, 12)):
            kind = generator.random()
            low, high = generator.choice(RANGES)
            if kind < 0.15:
                parts.append(generator.choice(PIECES))
            elif kind < 0.3:
                parts.append(chr(generator.randint(low, high)) * generator.randint(1, 40))
            else:
                length = generator.randint(1, 12)
                parts.append("".join(chr(generator.randint(low, high)) for _ in range(length)))
        texts.append("".join(parts))
    return texts


@pytest.fixture(scope="module")
def cl100k_like(tmp_path_factory):
    """Byte-level BPE with the pre-tokeniser of GPT-4."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K_LIKE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f.read_text() for f in speeches()[:6]], trainer)
    folder = tmp_path_factory.mktemp("cl100k")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.mark.parametrize("which", ["bytelevel_folder", "cl100k_like", "sentencepiece_model"])
def test_random_unicode_gives_the_same_ids(request, which):
    path = request.getfixturevalue(which)
    plain = load_tokenizer(path)
    fast = GigatokenTokenizer(plain, path, False)
    texts = random_texts(4000, seed=7) + [file.read_text() for file in speeches()[20:23]]
    got, expected = fast.encode_batch(texts), plain.encode_batch(texts)
    wrong = [t for t, a, b in zip(texts, got, expected, strict=True) if a.tolist() != b.tolist()]
    assert not wrong, f"{len(wrong)} differ, first {wrong[0]!r}"
    assert (fast.sha256, fast.eod_id, fast.vocab_size) == (
        plain.sha256,
        plain.eod_id,
        plain.vocab_size,
    )


def test_every_character_is_taken_for_a_letter_or_not_by_both(tmp_path):
    """gigatoken knows a newer Unicode than `tokenizers`: U+A7CE is a letter to one alone."""
    characters = _byte_characters()
    vocab = {character: byte for byte, character in characters.items()}
    merges = [(mark, characters[lead]) for mark in '"1' for lead in range(0xC2, 0xF5)]
    vocab |= {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    fast = GigatokenTokenizer(load_tokenizer(tmp_path, "<|endoftext|>"), tmp_path, False)
    assert fast.encode_batch(["\ua7ce", "a"])[0].tolist() == [0xEA, 0x9F, 0x8E]
    codes = [c for c in range(0x80, 0x33500) if not 0xD800 <= c < 0xE000]
    blocks = [codes[i : i + 16] for i in range(0, len(codes), 16)]
    texts = ["".join(f'"{chr(c)}1{chr(c)}' for c in block) for block in blocks]
    got, expected = fast.encode_batch(texts), fast.plain.encode_batch(texts)
    wrong = [t for t, a, b in zip(texts, got, expected, strict=True) if a.tolist() != b.tolist()]
    assert not wrong, f"{len(wrong)} differ, first {wrong[0]!r}"


@pytest.mark.parametrize("which", ["bytelevel_folder", "sentencepiece_model"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_shard_by_either_backend(tmp_path, request, which, workers):
    recipe = Recipe(str(request.getfixturevalue(which)))
    content = []
    for backend in ("plain", "gigatoken"):
        inputs, prefix = speeches()[:12], tmp_path / backend
        (made,) = build_all(inputs, recipe, prefix, workers, backend=backend, progress=False)
        content.append(made.manifest)
    assert content[0] == content[1]


def test_another_id_is_noticed_in_every_unit(tmp_path, monkeypatch, bytelevel_folder):
    plain_ids = GigatokenTokenizer.encode_each

    def wrong(self, texts):
        first, *rest = plain_ids(self, texts)
        return [np.where(first == first[5], first + 1, first), *rest]

    monkeypatch.setattr(GigatokenTokenizer, "encode_each", wrong)
    recipe = Recipe(str(bytelevel_folder))
    with pytest.raises(DataError, match="gigatoken and the plain tokenizer differ at token"):
        build_all(speeches()[:1], recipe, tmp_path / "x", backend="gigatoken", progress=False)
    assert not (tmp_path / "x.bin").exists()


def test_what_gigatoken_cannot_do_is_refused(tmp_path):
    train_tokenizer(speeches()[:4], 600, "unigram", tmp_path / "u.model", progress=False)
    path = tmp_path / "u.model"
    with pytest.raises(DataError, match=r"u\.model: gigatoken cannot do it .*; use plain"):
        GigatokenTokenizer(load_tokenizer(path), path, False)
    recipe = Recipe(str(tmp_path / "u.model"))
    with pytest.raises(DataError, match="use plain"):  # told by the one that loads for all workers
        build_all(speeches()[:200], recipe, tmp_path / "x", 2, backend="gigatoken", progress=False)


@pytest.mark.parametrize("option", [{}, {"single_word": True}, {"lstrip": True}])
def test_added_tokens(tmp_path, cl100k_like, option):
    library = Tokenizer.from_file(str(cl100k_like / "tokenizer.json"))
    library.add_tokens([AddedToken("hello", **option), AddedToken("    ")])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    plain = load_tokenizer(path, "<|endoftext|>")
    if option:
        with pytest.raises(DataError, match="the added token 'hello' depends on what surrounds"):
            GigatokenTokenizer(plain, path, False)
        return
    fast = GigatokenTokenizer(plain, path, False)
    fast.check(["say hello", "hellohello", "a    b", "hell o", "x<|endoftext|>y"], "here")


def test_memory_of_words_that_never_repeat_is_bounded(monkeypatch, tmp_path, bytelevel_folder):
    """The tokenizer is opened anew when it has grown, and the ids stay the same."""
    monkeypatch.setattr(unit, "TOKENIZER_GROWTH_BYTES", 64 << 20)
    file = write_jsonl(tmp_path / "a.jsonl", ["x"])
    encoder = unit.Encoder(make_plan([str(file)], Recipe(str(bytelevel_folder))), "gigatoken")
    generator, opened, probe = np.random.default_rng(0), set(), ["the people of these states"]
    expected = encoder.encode(probe)[0].tolist()
    process = psutil.Process()
    before, peak = process.memory_info().rss, 0
    for _ in range(24):
        words = generator.integers(97, 123, (150_000, 9), dtype=np.uint8)
        words[:, 8] = 32
        encoder.encode([words.tobytes().decode()])
        encoder.limit_memory()
        opened.add(id(encoder.tokenizer))
        peak = max(peak, process.memory_info().rss)
        assert encoder.encode(probe)[0].tolist() == expected
    assert len(opened) > 1
    assert peak - before < 400 << 20


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory, cl100k_like):
    """The same vocabulary in tiktoken's form, where the order of merges is the order of ids."""
    content = json.loads((cl100k_like / "tokenizer.json").read_text())
    to_byte = {c: b for b, c in _byte_characters().items()}
    path = tmp_path_factory.mktemp("tiktoken") / "a.tiktoken"
    ranks = {
        bytes(to_byte[c] for c in token): i
        for token, i in content["model"]["vocab"].items()
        if token != "<|endoftext|>"
    }
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for token, i in ranks.items())
    path.write_text("".join(lines))
    notes = {
        "pattern": CL100K_LIKE,
        "special_tokens": {"<|endoftext|>": 0},
        "eos_token": "<|endoftext|>",
    }
    path.with_suffix(".json").write_text(json.dumps(notes))
    return path


def _byte_characters() -> dict[int, str]:
    """The character by which byte-level vocabularies write each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_tiktoken_gives_the_same_ids(tmp_path, tiktoken_file, cl100k_like):
    fast, plain = load_tokenizer(tiktoken_file), load_tokenizer(cl100k_like)
    texts = random_texts(3000, seed=8) + [file.read_text() for file in speeches()[20:23]]
    for text, a, b in zip(texts, fast.encode_batch(texts), plain.encode_batch(texts), strict=True):
        assert a.tolist() == b.tolist(), text
        assert fast.decode(a) == text
    assert (fast.vocab_size, fast.eod_id) == (plain.vocab_size, plain.eod_id)
    special = load_tokenizer(tiktoken_file, special_text=True)
    assert special.encode_batch(["<|endoftext|>"])[0].tolist() == [0]
    (made,) = build_all(speeches()[:3], Recipe(str(tiktoken_file)), tmp_path / "t", progress=False)
    (same,) = build_all(speeches()[:3], Recipe(str(cl100k_like)), tmp_path / "h", progress=False)
    assert made.manifest.bin_sha256 == same.manifest.bin_sha256


def test_tiktoken_files_that_do_not_fit(tmp_path, tiktoken_file):
    path, notes = tmp_path / "a.tiktoken", tmp_path / "a.json"
    path.write_bytes(tiktoken_file.read_bytes())
    with pytest.raises(DataError, match=r"does not say how text is split; write .*a\.json"):
        load_tokenizer(path)
    notes.write_text('{"pattern": 1}')
    with pytest.raises(DataError, match=r"a\.json: the notes of a\.tiktoken must be"):
        load_tokenizer(path)
    notes.write_text('{"pattern": "x", "special_tokens": {"<end>": 5000}}')
    with pytest.raises(DataError, match=r"no eos_token in its notes; .*: <end>"):
        load_tokenizer(path)
    assert load_tokenizer(path, "<end>").vocab_size == 5001
    notes.write_text('{"pattern": "x", "special_tokens": {"<end>": 7}}')
    with pytest.raises(DataError, match="an id occurs twice"):
        load_tokenizer(path, "<end>")
    path.write_text("no base64!\n")
    with pytest.raises(DataError, match=r"a\.tiktoken:1: not a base64 token"):
        load_tokenizer(path, "<end>")


def test_a_text_that_tiktoken_cannot_encode_is_a_bad_line(tmp_path, monkeypatch, tiktoken_file):
    """The library panics with what is no Exception."""

    class Panic(BaseException):
        pass

    encode = tiktoken.Encoding.encode_to_numpy

    def panicking(self, text, **options):
        if "crash" in text:
            raise Panic("stack overflow")
        return encode(self, text, **options)

    monkeypatch.setattr(tiktoken.Encoding, "encode_to_numpy", panicking)
    file = write_jsonl(tmp_path / "a.jsonl", ["good", "", "crash", "fine"])
    recipe = Recipe(str(tiktoken_file), on_bad_line="skip")
    (made,) = build_all([file], recipe, tmp_path / "x", progress=False)
    assert (made.manifest.documents, made.manifest.counts["rejected"]) == (2, 1)
    with pytest.raises(DataError, match=r"a\.jsonl:3: the tokenizer failed: stack overflow"):
        build_all([file], Recipe(str(tiktoken_file)), tmp_path / "y", progress=False)
