"""Shards read by Megatron's own classes, and written the same as by its builder."""

from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from mixtron.data_prep.build import build_all
from mixtron.data_prep.plan import Recipe
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer import load_tokenizer
from tests.data_prep.corpora import speeches

LENGTH = 64


def test_every_shard_of_a_build(tmp_path, sentencepiece_model):
    inputs = [f"early={speeches()[0].parent}/179*", f"late={speeches()[0].parent}/180*"]
    recipe = Recipe(str(sentencepiece_model), held_out=0.3)
    made = build_all(inputs, recipe, tmp_path / "x", progress=False)
    assert len(made) == 4
    tokenizer = load_tokenizer(sentencepiece_model)
    for one in made:
        prefix, shard = one.output.prefix, Shard(one.output.prefix)
        builder = IndexedDatasetBuilder(f"{prefix}-theirs.bin", dtype=np.uint16)
        for i in range(shard.documents):
            document = shard.document(i).astype(np.uint16)
            builder.add_document(document, [len(document)])
        builder.finalize(f"{prefix}-theirs.idx")
        for suffix in ("bin", "idx"):
            ours = (tmp_path / f"{prefix}.{suffix}").read_bytes()
            assert ours == (tmp_path / f"{prefix}-theirs.{suffix}").read_bytes()

        samples = (shard.total_tokens - 1) // LENGTH
        dataset = _gpt_dataset(prefix, samples, tokenizer.eod_id)
        tokens = shard.tokens(0, shard.total_tokens)
        windows = {tuple(dataset[i]["tokens"].tolist()) for i in range(samples)}
        documents = [shard.document(i).tolist() for i in range(shard.documents)]
        inside = {tuple(d[i : i + LENGTH]) for d in documents for i in range(len(d) - LENGTH + 1)}
        assert len(windows & inside) > samples // 2  # the others span two shuffled documents
        assert {t for window in windows for t in window} <= set(tokens.tolist())


def _gpt_dataset(prefix: str, samples: int, eod_id: int) -> GPTDataset:
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([prefix], None),
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=SimpleNamespace(
            eod=eod_id, pad=0, vocab_size=1000, unique_identifiers={"name": "test"}
        ),
    )
    indexed = IndexedDataset(prefix)
    indices = np.arange(len(indexed), dtype=np.int32)
    return GPTDataset(indexed, prefix, indices, samples, Split.train, config)
