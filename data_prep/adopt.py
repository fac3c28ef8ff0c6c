"""A manifest for shards that Megatron-LM wrote, after reading them in full."""

from pathlib import Path

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.files import write_whole
from mixtron.data_prep.manifest import Manifest
from mixtron.data_prep.shards import Shard, shard_paths, token_dtype
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.data_prep.verify import read_contents


def adopt(
    prefix: str | Path, tokenizer_path: str | Path, eod_token: str | None, progress: bool = True
) -> Manifest:
    """Writes `PREFIX.json` beside a `.bin` and `.idx`, which stay as they are.

    Args:
        tokenizer_path: the tokenizer that they were made with; the files do not say.

    Raises:
        DataError: there is a manifest already, the files disagree, or hold ids that the
            tokenizer does not have.
    """
    bin_path, idx_path, json_path = shard_paths(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise DataError(f"{path}: no such file; give the prefix, without .bin")
    if json_path.exists():
        raise DataError(f"{json_path} exists; the shard has its manifest already")
    tokenizer = load_tokenizer(tokenizer_path, eod_token)
    contents = read_contents(prefix, progress)
    if contents.tokens == 0:
        raise DataError(f"{bin_path}: no tokens")
    if contents.max_id >= tokenizer.vocab_size:
        raise DataError(
            f"{bin_path}: holds id {contents.max_id}, but {tokenizer_path} has only "
            f"{tokenizer.vocab_size}: another tokenizer"
        )
    if contents.dtype != token_dtype(tokenizer.vocab_size).name and contents.dtype != "int32":
        raise DataError(
            f"{bin_path}: {contents.dtype}, too narrow for {tokenizer.vocab_size} ids: some may "
            "have been cut short; build it again"
        )
    special = set(tokenizer.special.values())
    begins = contents.begins if len(contents.begins) == 1 else set()
    manifest = Manifest(
        dtype=contents.dtype,
        documents=contents.documents,
        tokens=contents.tokens,
        max_id=contents.max_id,
        longest_document=contents.longest_document,
        cardinality=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id if contents.ends == {tokenizer.eod_id} else None,
        bos_id=begins.pop() if begins and begins <= special else None,
        special_text=False,
        tokenizer={key: getattr(tokenizer, key) for key in ("type", "sha256", "vocab_size")},
        inputs=[],
        bin_sha256=contents.bin_sha256,
        idx_sha256=contents.idx_sha256,
        counts={},
    )
    write_whole(json_path, manifest.to_json().encode())
    return Shard(prefix).manifest
