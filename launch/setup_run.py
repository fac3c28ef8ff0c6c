"""Builds everything one rank holds, and resumes it."""

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from mixtron.launch import heartbeat
from mixtron.launch.agreement import on_first
from mixtron.launch.checkpoint import (
    check_checkpoint,
    find_checkpoint,
    load_checkpoint,
    load_weights,
)
from mixtron.launch.checkpoint_files import delete, read_manifest
from mixtron.launch.checkpoint_folder import check_shared_folder, set_aside_old
from mixtron.launch.checkpoint_identity import (
    converted_step,
    refuse_changed_data,
    refuse_changes,
)
from mixtron.launch.checks import check_device
from mixtron.launch.config import RunConfig, dump_config
from mixtron.launch.config_sections import DataConfig
from mixtron.launch.data import AnyTraining, AnyValidation
from mixtron.launch.lifetime import lock_run_folder
from mixtron.launch.loop import Progress, Run
from mixtron.launch.memory import micro_batches
from mixtron.launch.preflight import check_ranks
from mixtron.launch.saver import Saver
from mixtron.launch.self_test import check_kernels
from mixtron.launch.signals import StopFlag
from mixtron.launch.whole_files import replaced
from mixtron.megatron_ext.deepspeed_engine import build_deepspeed
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.layer_graphs import LayerGraphs
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.optimizer import build_optimizer, wrap_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel
from mixtron.megatron_ext.permutation_check import compare_permutations

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def prepare(
    config: RunConfig,
    data: AnyTraining,
    validation: dict[str, AnyValidation],
    stop: StopFlag | None = None,
) -> Run:
    """All ranks call it. Raises errors with an exit code for what a person must mend.

    Args:
        stop: looked at before the slow parts; None: signals are left as they are.
    """
    device = init_distributed()
    check_device(config, device.type)
    check_ranks(device)
    if stop is not None:
        stop.stop_if_agreed(device, "before the model was built")
    parallel, training = config.parallel, config.training
    ranks = init_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline,
        parallel.context,
        seed=training.seed,
        device=device,
    )
    on_first(ranks, lambda: claim_run_folder(config))
    on_first(ranks, lambda: refuse_full_disk(config))
    console = Console(soft_wrap=True, highlight=False)
    say = (lambda text: console.print(text, markup=False)) if ranks.is_first else lambda text: None
    if said := check_kernels(config, device):
        say(said)
    chunks = build_model(
        config.model,
        config.mixers,
        parallel,
        ranks,
        seed=training.seed,
        bf16=training.precision == "bf16",
        recompute=training.recompute == "full",
        recomputed=training.recomputed,
        max_tokens=training.micro_batch_sequences * config.data.sequence_length,
    )
    if training.debug:
        compare_permutations(chunks, ranks)
    wrapped, optimizer = build_engine(chunks, config, ranks)
    saver = Saver(Path(config.run_dir) / "checkpoints", config.checkpoint, ranks, say)
    run = Run(config, ranks, wrapped, optimizer, data, validation, Progress(), saver, say)
    say(describe(config, ranks))
    heartbeat.beat("load")
    resume(run)
    saver.reserve(wrapped, optimizer)
    if stop is not None:
        stop.stop_if_agreed(device, f"before step {run.progress.step + 1}")
    return run


def build_engine(chunks: list, config: RunConfig, ranks: Ranks) -> tuple[list, Any]:
    """What holds gradients and weights, and what updates them."""
    if config.zero is not None:
        return build_deepspeed(
            chunks,
            config.optimizer,
            config.zero,
            ranks,
            micro_batches=micro_batches(config, ranks.world_size),
            overlap=config.parallel.overlap,
        )
    wrapped = wrap_model(chunks, config.parallel, ranks)
    if config.training.layer_graphs:
        LayerGraphs(wrapped[0])
    bf16 = config.training.precision == "bf16"
    return wrapped, build_optimizer(wrapped, config.optimizer, ranks, bf16=bf16)


def claim_run_folder(config: RunConfig) -> None:
    """Locks the folder, and writes into it what is run: the resolved config and the tokenizer."""
    run_dir = Path(config.run_dir)
    lock_run_folder(run_dir)
    (run_dir / "exit.json").unlink(missing_ok=True)
    dump_config(config, run_dir / "config.yaml")
    if isinstance(config.data, DataConfig):
        copy_tokenizer(Path(config.data.tokenizer), run_dir / "tokenizer")


def copy_tokenizer(tokenizer: Path, copy: Path) -> None:
    copy.mkdir(exist_ok=True)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    names = [tokenizer.name] if tokenizer.suffix == ".model" else TOKENIZER_FILES
    for name in names:
        if (folder / name).is_file():
            with replaced(copy / name) as file:
                shutil.copyfile(folder / name, file)


def refuse_full_disk(config: RunConfig) -> None:
    """Hours before the first save would find it out.

    Raises:
        ConfigError: less is free than one checkpoint takes.
    """
    from mixtron.launch.validate import checkpoint_bytes

    needed, free = checkpoint_bytes(config), shutil.disk_usage(config.run_dir).free
    if needed > free:
        raise ConfigError(
            f"run_dir={config.run_dir}: {free / 2**30:,.2f} GiB are free there, but a checkpoint "
            f"takes {needed / 2**30:,.2f} GiB; make room or set run_dir to another file system"
        )


def resume(run: Run) -> None:
    """Continues from the newest complete checkpoint, or from where a new run is told to start."""
    config, root = run.config.checkpoint, run.saver.root
    if run.ranks.is_first:
        root.mkdir(parents=True, exist_ok=True)
    check_shared_folder(root, run.ranks)
    delete(set_aside_old(root, None, run.ranks))
    path = find_checkpoint(root, config.resume, run.ranks)
    if path is not None:
        continue_from(run, path, branch=False)
    elif config.branch_from is not None:
        path = Path(config.branch_from)
        check_checkpoint(path, run.ranks)
        continue_from(run, path, branch=True)
    elif config.init_from is not None:
        start_with_weights(run, Path(config.init_from))
    else:
        run.say(f"no checkpoint in {root}: starting anew from step 0")


def continue_from(run: Run, path: Path, *, branch: bool) -> None:
    """Restores everything, or refuses what may not differ."""
    config = run.config

    def compare() -> tuple[int, list[str]]:
        manifest = read_manifest(path)
        state = manifest["state"]
        step = converted_step(path, manifest, config, run.ranks.data_size, branch=branch)
        notes = refuse_changes(path, manifest, config, branch=branch)
        return step, notes + refuse_changed_data(path, state, config, run.data, branch=branch)

    step, notes = on_first(run.ranks, compare)
    for note in notes:
        run.say(note)
    state = load_checkpoint(path, run.wrapped, run.optimizer, run.ranks)
    run.data.load_state_dict(state["data"])
    run.progress = Progress(**state["progress"])
    said = f"{'branched from' if branch else 'resumed'} {path} after step {run.progress.step}"
    if step != run.progress.step:
        run.progress.step = step
        run.progress.samples = step * config.global_batch_sequences
        said += f", which is step {step} of this global batch"
    run.saver.newest_step = step
    run.say(said)


def start_with_weights(run: Run, path: Path) -> None:
    """Takes the weights of a checkpoint, and nothing else of it."""
    check_checkpoint(path, run.ranks)
    allowed = run.config.checkpoint.init_allow
    drawn = load_weights(path, run.wrapped, run.ranks, allowed=allowed)
    run.optimizer.reload_model_params()
    for name in drawn:
        run.say(f"checkpoint.init_allow: {name} differs and starts as drawn")
    run.say(f"weights of {path}: starting from step 0")


def describe(config: RunConfig, ranks: Ranks) -> str:
    """One paragraph on what is about to run."""
    from mixtron.launch.estimate import parameters, training_flops_per_token

    parallel = config.parallel
    total = sum(parameters(config).values())
    return (
        f"{config.name}: {total / 1e6:,.1f} M parameters, layers {' '.join(config.model.pattern)} "
        f"x {config.model.layers}, {training_flops_per_token(config) / 1e9:,.2f} GFLOP/token, "
        f"{ranks.world_size} ranks on {ranks.device.type} = data {ranks.data_size} x tensor "
        f"{parallel.tensor}{' (sequence)' if parallel.sequence else ''} x pipeline "
        f"{parallel.pipeline} x context {parallel.context}\nrun folder: {Path(config.run_dir)}"
    )
