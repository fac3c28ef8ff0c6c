"""Builds everything one rank holds, and resumes it."""

import shutil
from pathlib import Path

from rich.console import Console

from mixtron.launch import heartbeat
from mixtron.launch.agreement import on_first
from mixtron.launch.checkpoint import (
    check_shared_folder,
    find_checkpoint,
    load_checkpoint,
    remove_old,
)
from mixtron.launch.config import RunConfig, dump_config
from mixtron.launch.data import TrainingData, ValidationData, compare_records
from mixtron.launch.lifetime import lock_run_folder
from mixtron.launch.loop import Progress, Run
from mixtron.launch.preflight import check_ranks
from mixtron.launch.signals import StopFlag
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.optimizer import build_optimizer, wrap_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def prepare(
    config: RunConfig,
    data: TrainingData,
    validation: dict[str, ValidationData],
    stop: StopFlag | None = None,
) -> Run:
    """All ranks call it. Raises errors with an exit code for what a person must mend."""
    stop = stop or StopFlag()
    device = init_distributed()
    check_ranks(device)
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
    console = Console(soft_wrap=True, highlight=False)
    say = (lambda text: console.print(text, markup=False)) if ranks.is_first else lambda text: None
    bf16 = training.precision == "bf16"
    chunks = build_model(
        config.model,
        config.mixers,
        parallel,
        ranks,
        seed=training.seed,
        bf16=bf16,
        recompute=training.recompute == "full",
        max_tokens=training.micro_batch_sequences * config.data.sequence_length,
    )
    wrapped = wrap_model(chunks, parallel, ranks)
    optimizer = build_optimizer(wrapped, config.optimizer, ranks, bf16=bf16)
    run = Run(config, ranks, wrapped, optimizer, data, validation, Progress(), stop, say)
    say(describe(config, ranks))
    heartbeat.beat("load")
    resume(run)
    stop.stop_if_agreed(device, f"before step {run.progress.step + 1}")
    return run


def claim_run_folder(config: RunConfig) -> None:
    """Locks the folder, and writes into it what is run: the resolved config and the tokenizer."""
    run_dir = Path(config.run_dir)
    lock_run_folder(run_dir)
    (run_dir / "exit.json").unlink(missing_ok=True)
    dump_config(config, run_dir / "config.yaml")
    tokenizer, copy = Path(config.data.tokenizer), run_dir / "tokenizer"
    copy.mkdir(exist_ok=True)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    names = [tokenizer.name] if tokenizer.suffix == ".model" else TOKENIZER_FILES
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, copy / name)


def resume(run: Run) -> None:
    """Continues from the newest complete checkpoint, or says that the run starts anew."""
    config, root = run.config, run.checkpoints
    if run.ranks.is_first:
        root.mkdir(parents=True, exist_ok=True)
    check_shared_folder(root, run.ranks)
    remove_old(root, None, run.ranks)
    path = find_checkpoint(root, config.checkpoint.resume, run.ranks)
    if path is None:
        run.say(f"no checkpoint in {root}: starting from step 0")
        return
    state = load_checkpoint(path, run.wrapped, run.optimizer, run.ranks)
    differences = compare_records(state["data_record"], run.data.record())
    if differences and not config.data.allow_changed:
        raise ConfigError(
            f"{path}: the data differ from the checkpoint's: {'; '.join(differences)}; "
            "set data.allow_changed=true to go on with the data as they are now"
        )
    for difference in differences:
        run.say(f"data changed since the checkpoint: {difference}")
    run.data.load_state_dict(state["data"])
    run.progress = Progress(**state["progress"])
    run.say(f"resumed {path} after step {run.progress.step}")


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
