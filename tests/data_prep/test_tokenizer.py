import io
import json
import shutil
import time

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.shards import token_dtype
from mixtron.data_prep.tokenizer import load_tokenizer, train_tokenizer
from mixtron.data_prep.tokenizer_training import split_text
from tests.data_prep.corpora import speeches, write_jsonl

TEXTS = [
    "The  Constitution of\tthe United States.\r\n\n  Two spaces, trailing \n",
    "x<|endoftext|>y </s><s> <unk>",
    "naïve Москва 東京 🗽 \u2028 e\u0301",
    " ",
    "1789",
]


def test_sentencepiece_text_comes_back_unchanged(sentencepiece_model):
    tokenizer = load_tokenizer(sentencepiece_model)
    ids = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(i) for i in ids] == TEXTS
    assert tokenizer.vocab_size == 1000
    assert not any({0, 1, 2}.intersection(i.tolist()) for i in ids)


def test_bytelevel_text_comes_back_unchanged(bytelevel_folder):
    tokenizer = load_tokenizer(bytelevel_folder)
    ids = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(i) for i in ids] == TEXTS
    assert tokenizer.vocab_size == 1000
    assert tokenizer.decode([tokenizer.eod_id]) == "<|endoftext|>"
    assert not any(tokenizer.eod_id in i.tolist() for i in ids)


def test_sentencepiece_without_end_of_sentence_is_refused(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(speeches()[0].read_text().splitlines()),
        model_writer=model,
        vocab_size=300,
        eos_id=-1,
        control_symbols=["<end>"],
        minloglevel=2,
    )
    path = tmp_path / "a.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(DataError, match=r"no end-of-sentence token .*\(<s>, <end>\).*eos_id"):
        load_tokenizer(path)
    assert load_tokenizer(path, "<end>").eod_id == 2
    with pytest.raises(DataError, match="no 'the' among its control tokens"):
        load_tokenizer(path, "the")


def test_huggingface_end_of_document(tmp_path, bytelevel_folder):
    alone = shutil.copy(bytelevel_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"no eod_token was given .*: <\|endoftext\|>$"):
        load_tokenizer(alone)
    with pytest.raises(DataError, match=r"'the' is not a special token; .*: <\|endoftext\|>$"):
        load_tokenizer(alone, "the")
    explicit = load_tokenizer(alone, "<|endoftext|>")
    by_config = load_tokenizer(bytelevel_folder)
    assert (explicit.eod_id, explicit.sha256) == (by_config.eod_id, by_config.sha256)
    config = {"eos_token": {"content": "<|endoftext|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).sha256 == by_config.sha256


def _with_added_tokens(base: int, added: int) -> Tokenizer:
    vocab = {f"w{i}": i for i in range(base)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([f"added{i}" for i in range(added - 1)])
    tokenizer.add_special_tokens([AddedToken("<eod>", special=True)])
    return tokenizer


def test_added_tokens_count(tmp_path):
    path = tmp_path / "tokenizer.json"
    _with_added_tokens(100, 3).save(str(path))
    tokenizer = load_tokenizer(path, "<eod>")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (103, 102)
    assert tokenizer.encode_batch(["w5 added1"])[0].tolist() == [5, 101]

    _with_added_tokens(65_400, 200).save(str(path))
    assert token_dtype(load_tokenizer(path, "<eod>").vocab_size) == "int32"


def test_a_long_document_without_words_takes_no_square_of_its_length(tmp_path):
    """Without a pre-tokeniser a whole document is one word, for which peers needed hours."""
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    special = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    text = " ".join(speeches()[0].read_text().split())
    library.train_from_iterator([text], trainer)
    library.pre_tokenizer = None
    library.normalizer = normalizers.Replace(" ", "▁")
    content = json.loads(library.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] == "</s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", "</s>")
    started = time.process_time()
    tokenizer.encode_batch([(text * 300)[:2_000_000]])
    assert time.process_time() - started < 60


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    library = _with_added_tokens(10, 1)
    library.enable_truncation(2)
    library.enable_padding(length=6)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, "<eod>")
    assert [i.tolist() for i in tokenizer.encode_batch(["w1 w2 w3", "w4"])] == [[1, 2, 3], [4]]


def test_a_vocabulary_that_makes_control_ids_from_text_is_refused(tmp_path):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "<>/sab")]
    library = Tokenizer(models.Unigram(pieces, unk_id=0))
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="text '</s>' in a document would become that special"):
        load_tokenizer(tmp_path, "</s>")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.model", b"not a model", "not a SentencePiece model"),
        ("tokenizer.json", b"{}", r"not a tokenizer\.json"),
        ("vocab.txt", b"", "a tokenizer is a SentencePiece"),
    ],
)
def test_what_is_no_tokenizer(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / name)
    with pytest.raises(DataError, match="no such tokenizer file"):
        load_tokenizer(tmp_path / "absent" / name)


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "bytelevel"])
def test_training_twice_gives_the_same_bytes(tmp_path, model_type):
    suffix = "" if model_type == "bytelevel" else ".model"
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for output in (first, second):
        train_tokenizer(speeches()[:4], 600, model_type, output, progress=False)
    assert load_tokenizer(first).vocab_size == 600
    if model_type == "bytelevel":
        first, second = first / "tokenizer.json", second / "tokenizer.json"
    assert first.read_bytes() == second.read_bytes()


def test_long_lines_are_not_lost_in_training(tmp_path):
    """Each document is one line of 10 kB; SentencePiece by itself drops lines above 4,192 bytes."""
    words = " ".join(speeches()[0].read_text().split())
    filler = (words * 2)[:9_900]
    file = write_jsonl(tmp_path / "a.jsonl", [f"{filler} zyxwv zyxwv zyxwv"] * 100)
    used = train_tokenizer([file], 900, "bpe", tmp_path / "a.model", progress=False)
    assert used["bytes_offered"] > 900_000
    assert used["bytes_used"] == used["bytes_offered"]
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a.model"))
    assert "▁zyxwv" in [model.id_to_piece(i) for i in range(900)]


def test_text_is_split_without_loss():
    text = "é" * 3000 + " word" * 700 + "\n\nshort\n"
    pieces = list(split_text(text))
    assert "".join(pieces) == text.replace("\n", "")
    assert max(len(piece.encode()) for piece in pieces) <= 4096
    assert pieces[-1] == "short"
    assert list(split_text("a\0b\u2585c")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("model_type", "vocab_size", "output", "message"),
    [
        ("bpe", 50_000, "a.model", r"a\.model: vocab_size=50000: Vocabulary size too high"),
        ("bpe", 100, "a.model", r"a\.model: vocab_size=100: "),
        ("bytelevel", 50_000, "a", "vocab_size=50000: the text yields only"),
        ("bytelevel", 256, "a", "vocab_size=256: at least 257"),
        ("bytelevel", 300, "a.json", "is a folder"),
        ("bpe", 300, "a", r"end its name in \.model"),
        ("bert", 300, "a", "bpe, unigram or bytelevel"),
    ],
)
def test_training_that_cannot_work(tmp_path, model_type, vocab_size, output, message):
    with pytest.raises(DataError, match=message) as caught:
        train_tokenizer(speeches()[:1], vocab_size, model_type, tmp_path / output, progress=False)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_training_names_the_bad_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text":"a b"}\n{"body":"c"}\n')
    for model_type, output in (("bpe", "a.model"), ("bytelevel", "a")):
        with pytest.raises(DataError, match=r"a\.jsonl:2: no key 'text'; keys here: body"):
            train_tokenizer([file], 300, model_type, tmp_path / output, progress=False)
