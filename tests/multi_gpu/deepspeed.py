"""ZeRO 2 and 3 over data ranks through NCCL, in bf16, against one rank: losses, norms, weights."""

from functools import partial

from mixtron.launch.micro_batch import run_micro_batches
from mixtron.megatron_ext.config import DeepSpeedConfig, ParallelConfig, ZeroOptimizationConfig
from mixtron.megatron_ext.deepspeed_engine import build_deepspeed
from mixtron.megatron_ext.model import build_model, global_parameters
from mixtron.megatron_ext.optimizer import clip_and_step
from tests.contract.steps import Model, micro_batches
from tests.multi_gpu import parity
from tests.multi_gpu.cases import Case, Differs, Options, Values
from tests.multi_gpu.groups import ranks_of
from tests.multi_gpu.parity import Compared
from tests.multi_gpu.subjects import subjects

MIXERS = ("kla", "softmax_attention")
STAGES = (2, 3)


def cases(options: Options) -> list[Case]:
    return [
        Case(f"{mixer}: stage {stage} x dp{options.gpus}", partial(compare, mixer, stage, options))
        for mixer in MIXERS
        for stage in STAGES
    ]


def compare(mixer: str, stage: int, options: Options) -> Values:
    exact, plain = parity.reference(mixer, options)
    losses, norms, weights = train(mixer, stage, options)
    seen = parity.Seen(exact.first, losses, norms, weights)
    measured = parity.with_pooled_few(
        [*parity.numbers(seen, exact, plain), *of_weights(seen, exact, plain)]
    )
    wrong = [m.line() for m in measured if not m.holds]
    if wrong:
        raise Differs("\n".join(wrong))
    worst = max(measured, key=lambda m: m.share)
    return {"worst": worst.what, "share of allowed": round(worst.share, 3), "losses": losses}


def of_weights(seen: parity.Seen, exact: parity.Seen, plain: parity.Seen) -> list[Compared]:
    return [
        parity.compared(f"weights of {name}", *(x.weights[name] for x in (seen, exact, plain)))
        for name in exact.weights
    ]


def train(mixer: str, stage: int, options: Options) -> tuple[list[float], list[float], dict]:
    """Some steps: losses, gradient norms and the last weights."""
    import deepspeed

    subject = subjects(options)[mixer]
    layout = parity.spread("dp", ParallelConfig(), options.gpus)
    config = parity.configuration(subject, layout, bf16=True)
    ranks = ranks_of(layout.parallel)
    tokens = max(map(sum, subject.documents)) * layout.sequences_per_micro_batch
    chunks = build_model(
        config.model, config.mixers, layout.parallel, ranks, seed=3, bf16=True, max_tokens=tokens
    )
    # Else parameters as small as these stay whole on every rank.
    split = ZeroOptimizationConfig(stage3_param_persistence_threshold=0 if stage == 3 else None)
    zero = DeepSpeedConfig(zero_stage=stage, pin_memory=False, zero_optimization=split)
    batches = micro_batches(subject, layout, Model(config, ranks, chunks, None))
    wrapped, optimizer = build_deepspeed(
        chunks, config.optimizer, zero, ranks, micro_batches=len(batches), overlap=True
    )
    losses, norms = [], []
    for _ in range(parity.STEPS):
        total, count = run_micro_batches(wrapped, config, ranks, batches, train=True).tolist()
        losses.append(total / count)
        norms.append(clip_and_step(optimizer, config.optimizer.clip_grad_norm)[0])
    parameters = list(chunks[0].parameters()) if stage == 3 else []
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        weights = {
            name: p.detach().float().cpu().clone() for name, p in global_parameters(chunks[0])
        }
    return losses, norms, weights
