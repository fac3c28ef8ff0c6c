"""The permutations of Stochastic Attention are the same on all ranks that must share them."""

from dataclasses import replace
from functools import partial

from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.permutation_check import PermutationMismatch, compare_permutations
from tests.contract.cases import CP2, ONE_RANK, TP2, Layout
from tests.contract.cases import Case as Subject
from tests.contract.steps import Model, micro_batches, run_logits
from tests.multi_gpu.cases import Case, Differs, Options, Values
from tests.multi_gpu.groups import ranks_of


def cases(options: Options) -> list[Case]:
    return [
        Case(f"permutations: {layout.name}", partial(compare, layout, options))
        for layout in (TP2, CP2, ONE_RANK)
    ]


def compare(layout: Layout, options: Options) -> Values:
    """Hashes agree over all ranks; and if one rank draws for another step, it is seen."""
    data = options.gpus // layout.parallel.model_ranks
    layout = Layout(f"{layout.name} dp{data}", layout.parallel, data)
    # One document on every rank: data ranks draw alike for documents of one length.
    subject = Subject("stochastic", ((64,),) * 2 * data)
    config, parallel = subject.config(layout), layout.parallel
    ranks = ranks_of(parallel)
    chunks = build_model(
        config.model, config.mixers, parallel, ranks, seed=3, bf16=True, max_tokens=64
    )
    model = Model(config, ranks, chunks, None)
    compare_permutations(chunks, ranks)
    batches = micro_batches(subject, layout, model)
    run_logits(model, batches)
    # So that every rank has one that differs in its first comparison, and none waits for the rest.
    number, count = ranks.data_rank, ranks.data_size
    if count == 1:
        number, count = ranks.world_rank, ranks.world_size
    step = 1 + int(number == count - 1)
    others = [replace(m, batch=replace(m.batch, step=step, _shared={})) for m in batches]
    try:
        run_logits(model, others)
    except PermutationMismatch as error:
        return {"seen": str(error)}
    raise Differs("a rank that draws other permutations is not seen")
