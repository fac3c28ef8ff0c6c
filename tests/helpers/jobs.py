"""Training jobs as a person starts them: real text, the real command, real torchrun."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ruamel.yaml import YAML

from mixtron.data_prep.build import build
from mixtron.data_prep.tokenizer import train_tokenizer
from tests.data_prep.corpora import speeches

VOCABULARY = 600
SEQUENCE = 32
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def make_corpus(folder: Path) -> None:
    """Tokenizer and one shard of ten addresses."""
    train_tokenizer(speeches()[:10], VOCABULARY, "bpe", folder / "tok.model", progress=False)
    build(speeches()[:10], folder / "tok.model", folder / "shard", progress=False)


def small_config(corpus: Path, run_dir: Path) -> dict:
    """KLA and softmax attention in turn, with dropout and accumulation; tens of steps a second."""
    return {
        "name": "job",
        "run_dir": str(run_dir),
        "model": {
            "layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "vocab_size": VOCABULARY,
            "pattern": ["kla", "attention"],
            "dropout": 0.1,
        },
        "mixers": {
            "kla": {"type": "kla", "heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8},
            "attention": {
                "type": "softmax_attention",
                "heads": 2,
                "kv_heads": 2,
                "head_dim": 8,
                "qk_norm": True,
            },
        },
        "parallel": {"tensor": 2, "sequence": True},
        "data": {
            "sequence_length": SEQUENCE,
            "tokenizer": str(corpus / "tok.model"),
            "split": {"train": 0.7, "held_out": 0.3},
            "train": [{"path": str(corpus / "shard"), "split": "train"}],
            "validation": {
                "speeches": {"path": str(corpus / "shard"), "split": "held_out", "sequences": 5}
            },
        },
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 5},
        "training": {"steps": 12, "global_batch_tokens": 4 * SEQUENCE, "precision": "fp32"},
        "checkpoint": {"save_every_steps": 4},
    }


def write_config(path: Path, config: dict) -> Path:
    with open(path, "w") as f:
        YAML(typ="safe", pure=True).dump(config, f)
    return path


@dataclass
class Job:
    """One `mixtron train`."""

    config: Path
    run_dir: Path
    ranks: int = 2
    overrides: list[str] = field(default_factory=list)

    def start(self) -> "Job":
        command = [sys.executable, "-m", "mixtron.launch.cli", "train", str(self.config)]
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with open(self.run_dir / "log.txt", "a") as log:
            self.process = subprocess.Popen(
                [*command, *self.overrides, "--nproc", str(self.ranks)],
                env=ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def wait(self, timeout_s: float = 400) -> int:
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """As when a node dies."""
        kill_with_children(self.process)

    def wait_for_step(self, step: int, timeout_s: float = 400) -> None:
        deadline = time.monotonic() + timeout_s
        while last_step(self.run_dir) < step:
            assert self.process.poll() is None, self.log()[-3000:]
            assert time.monotonic() < deadline, self.log()[-3000:]
            time.sleep(0.02)

    def log(self) -> str:
        return (self.run_dir / "log.txt").read_text()


def kill_with_children(process: subprocess.Popen) -> None:
    """SIGKILL to a launcher and all that it started, at once; waits for it."""
    try:
        launcher = psutil.Process(process.pid)
        victims = [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    psutil.wait_procs(victims[1:], timeout=20)
    process.wait()


def rows(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def last_step(run_dir: Path) -> int:
    return max((row["step"] for row in rows(run_dir)), default=0)


def history(run_dir: Path) -> list[tuple]:
    """What must be bit-equal between a straight and a resumed run, in order."""
    keys = ("train/loss", "train/grad_norm", "train/lr", "train/tokens", "validation/speeches")
    return [
        (row["step"], *((key, row[key]) for key in keys if key in row)) for row in rows(run_dir)
    ]
