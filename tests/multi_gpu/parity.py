"""Every mixer under every kind of parallelism, in bf16, against one rank.

The exact result is one rank's in fp32, with the weights that bf16 has. Under a layout the error
may be at most twice that of one rank's run in bf16, as for kernels (tests/helpers/numerics.py).
Where it is larger, the layout is run in fp32 as well: a model may magnify a rounding (gated linear
attention's norm does, of a document's first output (q.k) v where q.k is near 0), but what ranks do
wrong shows in fp32 too, and is then far above rounding.
Compared are the logits, the gradients of the first layer's input and of every parameter, and, over
some optimizer steps, losses, gradient norms and weights: gradients are reduced beside backward and
weights gathered beside the next forward, which no CPU run does.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mixtron.launch.agreement import gather
from mixtron.launch.config import RunConfig
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.mixers import mixer_configs
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.optimizer import build_optimizer, clip_and_step, wrap_model
from tests.contract.cases import ONE_RANK, TP2, Layout
from tests.contract.cases import Case as Subject
from tests.contract.checks import components, gradient, local_slice, local_tokens
from tests.contract.faults import injected
from tests.contract.steps import (
    Model,
    RankResult,
    accumulate_gradients,
    micro_batches,
    record_input_gradients,
    run_logits,
)
from tests.helpers.numerics import FACTOR
from tests.multi_gpu import permutations
from tests.multi_gpu.cases import Case, Differs, Options, Values
from tests.multi_gpu.groups import ranks_of
from tests.multi_gpu.subjects import subjects

STEPS = 2
"""In the second one gradients are reduced beside backward: the first learns their order."""
FEW = 64
"""Errors of so few numbers scatter: those alike are allowed the largest of one rank's, relative to
the size, and FEW_FLOOR."""
FEW_FLOOR = 0.3
"""Rounding alone makes errors of 0.2 where terms cancel (log-linear attention's `skip` on two H200,
two numbers a rank). What goes wrong is larger: half of the sum is missing, or counted twice, where
two ranks share it. More ranks than two share gradients by data alone, in buckets, beside parameters
of many numbers."""
FLOOR = 2.0**-8
"""Relative, of a single number such as a loss: one rounding to bf16."""
LATER_NORM_FLOOR = 0.1
"""Of a gradient norm after an optimizer step, whose rounding the second step magnifies: 0.04 was
seen on CPUs. Where one of two ranks' shares is left out or counted twice, it is 0.2 or more."""
VECTOR_FLOOR = 1e-3
"""Relative, of a norm: a quarter of a rounding, where one rank happens to make no error at all."""
SEVERAL_BUCKETS = 20_000
"""Parameters in a bucket: several buckets in models as small as these."""
CONTROLS = {"partial replicated gradient": TP2, "mean of means": ONE_RANK}
"""Faults that must be found in bf16 too, and under which layout."""
KERNEL_LAYOUTS = ("tp2 sp", "cp2", "dp")


@dataclass
class Seen:
    """What a rank saw of some steps."""

    first: RankResult
    """The first step, with the initial weights."""
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    """After the last step."""


def cases(options: Options) -> list[Case]:
    found = subjects(options)
    compared = [
        Case(f"{name}: {layout.name}", partial(compare, name, subject, layout, options))
        for layout in layouts(options.gpus)
        for name, subject in found.items()
        if layout.parallel.context == 1 or mixer_configs()[subject.mixer].context_parallel
        if not subject.name or layout.name.startswith(KERNEL_LAYOUTS)
    ]
    if "kla triton" in found:
        relayed = replace(
            found["kla triton"],
            overrides=(*found["kla triton"].overrides, "mixers.kla.context_exchange=relay"),
        )
        [cp2] = [layout for layout in layouts(options.gpus) if layout.name.startswith("cp2")]
        run = partial(compare, "kla triton", relayed, cp2, options)
        before_tp2 = next(i for i, case in enumerate(compared) if ": tp2 x" in case.name)
        compared.insert(before_tp2, Case(f"kla triton, relay: {cp2.name}", run))
    controls = [
        Case(f"control: {fault}", partial(catch, fault, layout, options))
        for fault, layout in CONTROLS.items()
    ]
    return [*permutations.cases(options), *compared, *controls]


def layouts(gpus: int) -> list[Layout]:
    """All of `gpus`, which divides by two: what is not split over models is data-parallel."""
    kinds = {
        "tp2 sp": ParallelConfig(tensor=2, sequence=True),
        "dp": ParallelConfig(bucket_parameters=SEVERAL_BUCKETS),
        "cp2": ParallelConfig(context=2, bucket_parameters=SEVERAL_BUCKETS),
        "pp2": ParallelConfig(pipeline=2),
        "tp2": ParallelConfig(tensor=2),
    }
    if gpus >= 4:
        kinds["tp2 sp cp2"] = ParallelConfig(tensor=2, sequence=True, context=2)
        kinds["tp2 sp pp2"] = ParallelConfig(tensor=2, sequence=True, pipeline=2)
    if gpus >= 8:
        kinds["tp2 sp pp2 cp2"] = ParallelConfig(tensor=2, sequence=True, pipeline=2, context=2)
    return [
        spread(name, parallel, gpus // parallel.model_ranks) for name, parallel in kinds.items()
    ]


def spread(name: str, parallel: ParallelConfig, data: int) -> Layout:
    """Two micro-batches on each data rank, of two sequences or of one."""
    sequences = 2 if data == 1 or parallel.model_ranks > 1 else 1
    return Layout(f"{name} x dp{data}", parallel, data, sequences_per_micro_batch=sequences)


def keep_reference(name: str, subject: Subject, options: Options) -> Values:
    layout = spread("one rank", ParallelConfig(), 1)
    plain = train(subject, layout, bf16=True)
    start = {name: shard.value for name, shard in plain.first.shards.items()}
    exact = train(subject, layout, bf16=False, start=start)
    path = reference_file(name, options)
    torch.save((exact, plain), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)  # whole, for those that wait for it
    return {"losses": exact.losses, "losses in bf16": plain.losses}


def reference_file(name: str, options: Options) -> Path:
    return options.out / f"reference-{name}.pt"


def reference(name: str, options: Options) -> tuple[Seen, Seen]:
    """One rank's results in fp32 and in bf16. Raises Differs: the process at them failed."""
    path = reference_file(name, options)
    if not path.exists():
        raise Differs(f"one rank has no results for {name}")
    return torch.load(path, weights_only=False)


def catch(fault: str, layout: Layout, options: Options) -> Values:
    """With a fault in the code, `compare` must find that something differs."""
    sound = subjects(options)["softmax_attention"]
    layout = spread(layout.name, layout.parallel, options.gpus // layout.parallel.model_ranks)
    try:
        with injected(fault):
            compare("softmax_attention", sound, layout, options)
    except Differs as error:
        return {"found": str(error).splitlines()[0]}
    raise Differs(f"{fault} is not found")


def train(
    subject: Subject, layout: Layout, *, bf16: bool, start: dict[str, Tensor] | None = None
) -> Seen:
    """Some optimizer steps on the same sequences, with everything of the first one."""
    model = build(subject, layout, bf16=bf16, start=start)
    batches = micro_batches(subject, layout, model)
    shards = model.shards()
    for shard in shards.values():
        shard.value = shard.value.cpu()
    logits = [x.cpu() for x in run_logits(model, batches)]
    input_gradients = record_input_gradients(model)
    losses, norms = [], []
    for number in range(STEPS):
        loss_sum, tokens = accumulate_gradients(model, batches)
        if number == 0:
            first_gradients = [x.float().cpu() for x in input_gradients]
            for name, parameter in model.parameters():
                shards[name].gradient = parameter.main_grad.detach().clone().cpu()
        norm, _ = clip_and_step(model.optimizer, model.config.optimizer.clip_grad_norm)  # type: ignore
        losses.append(loss_sum / tokens)
        norms.append(norm)
    for chunk in model.wrapped:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    ranks = model.ranks
    first = RankResult(
        ranks.tensor_rank,
        ranks.tensor_size,
        ranks.context_rank,
        ranks.context_size,
        ranks.data_rank,
        ranks.data_size,
        logits,
        first_gradients,
        losses[0],
        shards,
        norms[0],
        clipped_norm=0.0,
    )
    weights = {name: p.detach().float().cpu() for name, p in model.parameters()}
    return Seen(first, losses, norms, weights)


def build(
    subject: Subject, layout: Layout, *, bf16: bool, start: dict[str, Tensor] | None
) -> Model:
    config, parallel = configuration(subject, layout, bf16), layout.parallel
    ranks = ranks_of(parallel)
    tokens = max(map(sum, subject.documents)) * layout.sequences_per_micro_batch
    sizes = {"seed": 3, "bf16": bf16, "max_tokens": tokens}
    chunks = build_model(config.model, config.mixers, parallel, ranks, **sizes)
    model = Model(config, ranks, wrap_model(chunks, parallel, ranks), None)
    if start is not None:
        shards = model.shards()
        with torch.no_grad():
            for name, parameter in model.parameters():
                mine = local_slice(start[name], shards[name], ranks)  # type: ignore[arg-type]
                parameter.copy_(mine)
    model.optimizer = build_optimizer(model.wrapped, config.optimizer, ranks, bf16=bf16)
    return model


def configuration(subject: Subject, layout: Layout, bf16: bool) -> RunConfig:
    """The contract's, with steps that move bf16 weights beyond their rounding."""
    config = subject.config(layout)
    mixers = config.mixers
    if not (bf16 and torch.cuda.is_available()):
        mixers = {name: plain_form(mixer) for name, mixer in mixers.items()}
    optimizer = config.optimizer.model_copy(update={"lr": 1e-3})
    return config.model_copy(update={"mixers": mixers, "optimizer": optimizer})


def plain_form(mixer):
    """A mixer by torch's form of its op: Triton's are for bf16 on a GPU."""
    field = type(mixer).model_fields.get("kernel")
    return mixer if field is None else mixer.model_copy(update={"kernel": field.default})


def compare(name: str, subject: Subject, layout: Layout, options: Options) -> Values:
    exact, plain = reference(name, options)
    seen = train(subject, layout, bf16=True)
    measured = [*numbers(seen, exact, plain), *tensors(seen, exact, plain)]
    unequal = [
        what
        for what, shard in seen.first.shards.items()
        if not torch.equal(
            shard.value, local_slice(plain.first.shards[what].value, shard, seen.first)
        )
    ]
    if unequal:
        raise Differs(f"starts from other weights: {', '.join(unequal)}")
    measured = with_pooled_few(measured)
    worst = max(measured, key=lambda m: m.share)
    values: Values = {
        "worst": worst.what,
        "share of allowed": round(worst.share, 3),
        "compared": len(measured),
    }
    # All ranks run it when one has to.
    if wrong := sum(gather(sum(not m.holds for m in measured))):
        values |= {"beyond bf16's": int(wrong), **compare_in_fp32(subject, layout, exact, plain)}
    return values


def compare_in_fp32(subject: Subject, layout: Layout, exact: Seen, plain: Seen) -> Values:
    start = {name: shard.value for name, shard in plain.first.shards.items()}
    seen = train(subject, layout, bf16=False, start=start)
    measured = [*numbers(seen, exact, exact), *tensors(seen, exact, exact)]
    wrong = [m.line() for m in measured if not m.holds]
    if wrong:
        raise Differs("in fp32:\n" + "\n".join(wrong))
    largest = max(m.error / m.size for m in measured if m.size)
    return {"largest error in fp32": largest}


def with_pooled_few(measured: list["Compared"]) -> list["Compared"]:
    """Losses among themselves, gradient norms too, and parameters of few numbers."""
    largest: dict[str, float] = {}
    for m in measured:
        if m.size:
            largest[m.alike] = max(largest.get(m.alike, 0.0), m.plain / m.size)
    return [
        replace(m, plain=largest[m.alike] * m.size) if m.count <= FEW and m.size else m
        for m in measured
    ]


@dataclass(frozen=True)
class Compared:
    """An error, beside one rank's own in bf16 and the size of the exact result."""

    what: str
    error: float
    plain: float
    size: float
    count: int
    """Of numbers compared."""
    alike: str = ""
    """What its errors are like, if there are few."""
    floor: float = VECTOR_FLOOR
    """Relative to the size, allowed whatever one rank's error is."""

    @property
    def allowed(self) -> float:
        return FACTOR * self.plain + self.floor * self.size

    @property
    def share(self) -> float:
        return self.error / self.allowed if self.allowed else float(self.error > 0)

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def line(self) -> str:
        return (
            f"{self.what}: error {self.error:.3e} over {self.allowed:.3e}; one rank's in bf16 is "
            f"{self.plain:.3e}, the size {self.size:.3e}"
        )


def numbers(seen: Seen, exact: Seen, plain: Seen) -> list[Compared]:
    """Losses and gradient norms of each step."""
    return [
        Compared(
            f"{what} of step {step + 1}",
            abs(mine - e),
            abs(p - e),
            abs(e),
            1,
            what,
            LATER_NORM_FLOOR if what == "norms" and step else FLOOR,
        )
        for what in ("losses", "norms")
        for step, (mine, e, p) in enumerate(
            zip(getattr(seen, what), getattr(exact, what), getattr(plain, what), strict=True)
        )
    ]


def tensors(seen: Seen, exact: Seen, plain: Seen) -> list[Compared]:
    """Of this rank's share."""
    mine, found = seen.first, []
    for what in ("logits", "input_gradients"):
        values = getattr(mine, what)
        if values:
            wanted, rounded = (
                share_of(torch.cat(getattr(x.first, what)).float(), mine, len(values), values)
                for x in (exact, plain)
            )
            found.append(compared(what, torch.cat(values), wanted, rounded))
    for name, shard in mine.shards.items():
        local = [
            components(local_slice(gradient(x.first.shards[name]), shard, mine), shard, mine)
            for x in (exact, plain)
        ]
        parts = components(gradient(shard), shard, mine)
        for part, *values in zip(shard.components or [""], parts, *local, strict=True):
            found.append(compared(f"gradient of {name} {part}", *values))
    held = list(mine.shards)
    weights = [
        torch.cat([local_slice(x.weights[n], mine.shards[n], mine).flatten() for n in held])
        for x in (exact, plain)
    ]
    return [
        *found,
        compared("weights", torch.cat([seen.weights[n].flatten() for n in held]), *weights),
    ]


def share_of(
    whole: Tensor, mine: RankResult, micro_batch_count: int, values: list[Tensor]
) -> Tensor:
    """This rank's tokens of what one rank has of all; under sequence parallelism a part of each
    micro-batch's."""
    share = local_tokens(whole, mine, micro_batch_count)
    if len(share) == sum(map(len, values)):
        return share
    parts = share.unflatten(0, (micro_batch_count, mine.tensor_size, -1))
    return parts[:, mine.tensor_rank].flatten(0, 1)


def compared(what: str, mine: Tensor, exact: Tensor, plain: Tensor) -> Compared:
    return Compared(
        what,
        float((mine - exact).norm()),
        float((plain - exact).norm()),
        float(exact.norm()),
        mine.numel(),
        *(("few", FEW_FLOOR) if mine.numel() <= FEW else ("many", VECTOR_FLOOR)),
    )
