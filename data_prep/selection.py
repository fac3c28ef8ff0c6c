"""Which documents go where: exact duplicates left out, some held out, by the hashes of texts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mixtron.data_prep.plan import Plan
from mixtron.data_prep.unit import HASH_BYTES, Receipt, unit_path

BUCKETS = 256
"""Documents are compared a bucket of hashes at a time: 24 bytes for each of its documents."""
BLOCK = 1 << 20
RECORD = np.dtype([("low", "<u8"), ("high", "<u8"), ("number", "<i8")])


class Selection:
    """The documents of a plan's units that are kept.

    Args:
        folder: of the units' files; scratch files of it are removed on leaving the context.
    """

    def __init__(self, plan: Plan, receipts: dict[str, Receipt], folder: Path) -> None:
        self._plan, self.folder = plan, folder
        units = [(unit, receipts[unit.key]) for unit in plan.units]
        counts = np.cumsum([0, *(receipt.documents for _, receipt in units)])
        self._first = {u.key: int(n) for (u, _), n in zip(units, counts[:-1], strict=True)}
        self._documents = {unit.key: receipt.documents for unit, receipt in units}
        self._scratch = folder / "selection.tmp"
        self._duplicate = None
        if plan.recipe.deduplicate and counts[-1] > 0:
            self._duplicate = self._find_duplicates(int(counts[-1]))

    def __enter__(self) -> "Selection":
        return self

    def __exit__(self, *_: object) -> None:
        self._duplicate = None
        for path in [self._scratch, *self.folder.glob("bucket-*.tmp")]:
            path.unlink(missing_ok=True)

    def blocks(self, key: str, held_out: bool) -> Iterator[np.ndarray]:
        """Of one unit, a block at a time: bool [documents], True for those that are kept."""
        documents = self._documents[key]
        for first in range(0, documents, BLOCK):
            count = min(BLOCK, documents - first)
            keep = np.ones(count, dtype=bool)
            if self._plan.recipe.held_out > 0:
                keep = self._is_held_out(key, first, count) == held_out
            if self._duplicate is not None:
                start = self._first[key] + first
                keep &= self._duplicate[start : start + count] == 0
            yield keep

    def duplicates(self, keys: list[str]) -> int:
        """Documents left out of these units."""
        if self._duplicate is None:
            return 0
        starts = [(self._first[key], self._documents[key]) for key in keys]
        return sum(int(self._duplicate[a : a + n].sum()) for a, n in starts)

    def _hashes(self, key: str) -> np.ndarray:
        """[documents, 2] uint64, mapped."""
        path = unit_path(self.folder, key, "hashes")
        shape = (self._documents[key], HASH_BYTES // 8)
        return np.memmap(path, dtype="<u8", mode="r", shape=shape)

    def _is_held_out(self, key: str, first: int, count: int) -> np.ndarray:
        # The high half decides: a text is on the same side wherever and however often it occurs.
        high = self._hashes(key)[first : first + count, 1]
        return (high >> np.uint64(11)) * 2.0**-53 < self._plan.recipe.held_out

    def _find_duplicates(self, documents: int) -> np.ndarray:
        """uint8 [documents], mapped from a scratch file: 1 where the text occurred before."""
        self._fill_buckets()
        duplicate = np.memmap(self._scratch, dtype=np.uint8, mode="w+", shape=(documents,))
        for bucket in range(BUCKETS):
            path = self._bucket(bucket)
            if not path.exists():
                continue
            records = np.fromfile(path, dtype=RECORD)
            # Stable, and filled in the order of the documents: the first of equals comes first.
            order = np.lexsort((records["low"], records["high"]))
            sorted_ = records[order]
            again = (sorted_["low"][1:] == sorted_["low"][:-1]) & (
                sorted_["high"][1:] == sorted_["high"][:-1]
            )
            duplicate[sorted_["number"][1:][again]] = 1
            path.unlink()
        return duplicate

    def _fill_buckets(self) -> None:
        for bucket in range(BUCKETS):
            self._bucket(bucket).unlink(missing_ok=True)
        for unit in self._plan.units:
            documents = self._documents[unit.key]
            for first in range(0, documents, BLOCK):
                hashes = np.array(self._hashes(unit.key)[first : first + BLOCK])
                records = np.empty(len(hashes), dtype=RECORD)
                records["low"], records["high"] = hashes[:, 0], hashes[:, 1]
                records["number"] = self._first[unit.key] + first + np.arange(len(hashes))
                bucket = (hashes[:, 0] % BUCKETS).astype(np.int64)
                order = np.argsort(bucket, kind="stable")
                stops = np.cumsum(np.bincount(bucket, minlength=BUCKETS))
                for i, part in enumerate(np.split(records[order], stops[:-1])):
                    if len(part):
                        with open(self._bucket(i), "ab") as f:
                            part.tofile(f)

    def _bucket(self, number: int) -> Path:
        return self.folder / f"bucket-{number:03}.tmp"
