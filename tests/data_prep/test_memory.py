"""Peak memory of whole builds, measured."""

import subprocess
import sys

import pytest

from tests.data_prep.corpora import speeches

CODE = """
import resource, sys
from mixtron.data_prep.build import build_all
from mixtron.data_prep.plan import Recipe

corpus, tokenizer, backend, deduplicate, prefix = sys.argv[1:]
recipe = Recipe(tokenizer, deduplicate=deduplicate == "True")
(made,) = build_all([corpus], recipe, prefix, backend=backend, progress=False)
print(made.manifest.documents, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def peak_mib(tmp_path, corpus, tokenizer, backend="plain", deduplicate=False) -> tuple[int, int]:
    """Documents built, and the peak memory of the process that did all of it."""
    arguments = corpus, tokenizer, backend, deduplicate, tmp_path / f"{corpus.stem}{backend}"
    run = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    documents, peak = map(int, run.stdout.split())
    return documents, peak


@pytest.mark.soak
@pytest.mark.parametrize("deduplicate", [False, True])
def test_five_million_documents_of_one_token(tmp_path, sentencepiece_model, deduplicate):
    file = tmp_path / "a.jsonl"
    count = 5_000_000
    with open(file, "w") as out:
        for first in range(0, count, 100_000):
            texts = range(first, first + 100_000) if deduplicate else ["a"] * 100_000
            out.writelines(f'{{"text":"{text}"}}\n' for text in texts)
    documents, peak = peak_mib(tmp_path, file, sentencepiece_model, deduplicate=deduplicate)
    print(f"peak {peak} MiB")
    assert documents == count
    assert peak < 1024


# What the libraries hold for each byte of a document, with a fifth to spare.
BOUNDS_MIB = {
    ("sentencepiece_model", "plain"): 1_500,
    ("bytelevel_folder", "plain"): 1_500,
    ("sentencepiece_model", "gigatoken"): 1_500,
    ("bytelevel_folder", "gigatoken"): 1_500,
}


@pytest.mark.soak
@pytest.mark.parametrize(("which", "backend"), BOUNDS_MIB)
def test_one_document_of_100_mb(tmp_path, request, which, backend):
    text = "\n".join(file.read_text() for file in speeches())
    file = tmp_path / "a.txt"
    file.write_text((text * 10)[:100_000_000])
    documents, peak = peak_mib(tmp_path, file, request.getfixturevalue(which), backend)
    print(f"peak {peak} MiB")
    assert documents == 1
    assert peak < BOUNDS_MIB[which, backend]
