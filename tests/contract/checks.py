"""What must hold of every mixer, as plain functions: the tests call them, and so do the tests that
put a fault into the code and expect a check to fail.

Tolerances are for fp32 on CPU. One rounding is 6e-8; the layouts differ in the order of sums over
at most a few hundred terms (matrix products over ranks, gradients over micro-batches), whose errors
add like a random walk and pass a few layers: 5e-7 to 3e-6 of the norm, measured (1.4e-5 where terms
cancel, see FLOOR). A missing or doubled contribution shows at 1e-2 and above.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mixtron.launch.estimate import parameters as predicted_parameters
from tests.contract.cases import ONE_RANK, Case, Layout
from tests.contract.steps import (
    RankResult,
    Shard,
    logits_of_streams,
    losses_of_steps,
    resumed_step,
    saved_and_loaded,
    step,
    trained_weights,
)
from tests.helpers.ranks import run_on_ranks

ROUNDING = 2**-24
TOLERANCE = 1e-5
"""Largest error allowed, relative to the norm of what is compared."""
FLOOR = 1e-7
"""Of the whole gradient's norm, about one rounding of it: what a component is allowed whose own
norm is small because the terms in it cancel (a decay's gradient is 1e-4 of the whole)."""
DRIFT = 1e-4
"""Of a parameter's movement over the optimizer steps, through which rounding errors grow."""


@cache
def results_of(case: Case, layout: Layout) -> list[RankResult]:
    """One optimizer step, once a session."""
    return run_on_ranks(layout.world_size, step, case, layout)


@cache
def trained(case: Case, layout: Layout, steps: int) -> list[dict[str, Shard]]:
    return run_on_ranks(layout.world_size, trained_weights, case, layout, steps)


def check_agrees(case: Case, layout: Layout) -> None:
    """Everything that one optimizer step shows, under a layout against one rank."""
    reference = results_of(case, ONE_RANK)[0]
    results = results_of(case, layout)
    check_initial_weights(reference, results)
    check_loss(reference, results)
    check_logits(reference, results)
    check_input_gradients(reference, results)
    check_gradients(reference, results)
    check_gradient_norm(case.config(layout).optimizer.clip_grad_norm, reference, results)


def check_initial_weights(reference: RankResult, results: list[RankResult]) -> None:
    """Every rank starts from its slice of the same model, bit for bit."""
    for rank, name, shard, result in _all_shards(reference, results):
        expected = local_slice(reference.shards[name].value, shard, result)
        assert torch.equal(shard.value, expected), f"rank {rank} draws {name} differently"


def check_loss(reference: RankResult, results: list[RankResult]) -> None:
    """The mean over all valid tokens, whichever rank and micro-batch they are in."""
    for rank, result in enumerate(results):
        error = abs(result.loss / reference.loss - 1)
        assert error <= TOLERANCE, f"rank {rank}: loss {result.loss}, not {reference.loss}"


def check_logits(reference: RankResult, results: list[RankResult]) -> None:
    expected = torch.cat(reference.logits)
    seen = 0
    for rank, result in enumerate(results):
        if result.logits:
            seen += 1
            mine = local_tokens(expected, result, len(result.logits))
            _assert_close(torch.cat(result.logits), mine, f"rank {rank}: logits")
    assert seen, "no rank returned logits"


def check_input_gradients(reference: RankResult, results: list[RankResult]) -> None:
    """Gradients of the first layer's input: what every layer passed back."""
    expected = torch.cat(reference.input_gradients)
    seen = 0
    for rank, result in enumerate(results):
        if result.input_gradients:
            seen += 1
            mine = local_tokens(expected, result, len(result.input_gradients))
            actual = torch.cat(result.input_gradients)
            if len(actual) != len(mine):  # sequence parallelism: a share of each micro-batch
                shares = mine.unflatten(0, (len(result.input_gradients), result.tensor_size, -1))
                mine = shares[:, result.tensor_rank].flatten(0, 1)
            _assert_close(actual, mine, f"rank {rank}: gradient of the embedding's output")
    assert seen, "no rank returned gradients of its input"


def check_gradients(reference: RankResult, results: list[RankResult]) -> None:
    """Every parameter on every rank, each component of a fused one by itself."""
    total = reference.gradient_norm
    wrong = []
    for rank, name, shard, result in _all_shards(reference, results):
        expected = local_slice(gradient(reference.shards[name]), shard, result)
        parts = zip(
            components(gradient(shard), shard, result),
            components(expected, shard, result),
            strict=True,
        )
        for part, (actual, wanted) in zip(shard.components or [""], parts, strict=True):
            error = float((actual - wanted).norm())
            allowed = TOLERANCE * float(wanted.norm()) + FLOOR * total
            if not error <= allowed:
                wrong.append(f"rank {rank}: {name} {part}: error {error:.2e} over {allowed:.2e}")
    assert not wrong, "gradients differ from one rank's:\n" + "\n".join(wrong)


def check_gradient_norm(clip: float, reference: RankResult, results: list[RankResult]) -> None:
    """The norm before clipping counts every shard once; after clipping it is the limit."""
    assert reference.gradient_norm > clip, "the case does not reach the clipping limit"
    for rank, result in enumerate(results):
        for what, actual, expected in [
            ("gradient norm", result.gradient_norm, reference.gradient_norm),
            ("norm after clipping", result.clipped_norm, clip),
        ]:
            error = abs(actual / expected - 1)
            assert error <= TOLERANCE, f"rank {rank}: {what} {actual}, not {expected}"


def check_replicas_equal(weights: list[dict[str, Shard]]) -> None:
    """What tensor-parallel ranks hold whole is the same on all of them, bit for bit."""
    for name, shard in weights[0].items():
        if shard.tensor_dim is None:
            for rank, other in enumerate(weights[1:], start=1):
                same = torch.equal(shard.value, other[name].value)
                assert same, f"{name} drifts apart between ranks 0 and {rank}"


def check_trained_weights(case: Case, layout: Layout, steps: int) -> None:
    """The model after some optimizer steps is one rank's."""
    reference = trained(case, ONE_RANK, steps)[0]
    starts = results_of(case, layout)
    for rank, (weights, start) in enumerate(zip(trained(case, layout, steps), starts, strict=True)):
        for name, shard in weights.items():
            expected = local_slice(reference[name].value, shard, start)
            moved = float((expected - start.shards[name].value).norm())
            error = float((shard.value - expected).norm())
            allowed = DRIFT * moved + ROUNDING * float(expected.norm())
            what = f"rank {rank}: {name} after {steps} steps"
            assert error <= allowed, f"{what}: error {error:.2e} over {allowed:.2e}"


def check_resume(case: Case, layouts: list[Layout], folder: Path) -> None:
    """Steps taken each under another layout, from the checkpoint of the one before, are one rank's.

    The last layout is one rank. Optimizer states come along: else the weights would move otherwise.
    """
    steps = len(layouts)
    reference, losses = (
        trained(case, ONE_RANK, steps)[0],
        run_on_ranks(1, losses_of_steps, case, steps)[0],
    )
    path, weights = None, {}
    for number, layout in enumerate(layouts, start=1):
        ranks = run_on_ranks(layout.world_size, resumed_step, case, layout, path, folder, number)
        path, loss, weights = ranks[0]
        error = abs(loss - losses[number - 1])
        assert error <= TOLERANCE * losses[number - 1], f"loss of step {number}, {layout.name}"
    for name, start in results_of(case, ONE_RANK)[0].shards.items():
        expected = reference[name].value
        moved = float((expected - start.value).norm())
        error = float((weights[name].value - expected).norm())
        allowed = DRIFT * moved + ROUNDING * float(expected.norm())
        assert error <= allowed, f"{name}: error {error:.2e} over {allowed:.2e}"


def check_layers_differ(reference: RankResult) -> None:
    """No two layers, and no two parameters, start from the same numbers."""
    drawn = {n: s.value for n, s in reference.shards.items() if s.value.unique().numel() > 1}
    seen: dict[bytes, str] = {}
    for name, value in drawn.items():
        other = seen.setdefault(value.flatten()[:8].numpy().tobytes(), name)
        assert other == name, f"{name} starts as {other} does"
    layers = {n.split(".")[2] for n in drawn if n.startswith("decoder.layers.")}
    assert len(layers) > 1, "the case has one layer"


def check_parameter_count(case: Case) -> None:
    """The estimate, part by part of each layer's mixer and as a whole, is what the model has."""
    config, shards = case.config(ONE_RANK), results_of(case, ONE_RANK)[0].shards
    for layer, mixer in enumerate(config.model.layer_mixers):
        prefix = f"decoder.layers.{layer}.self_attention."
        actual = sum(s.value.numel() for n, s in shards.items() if n.startswith(prefix))
        predicted = sum(config.mixers[mixer].parameters(config.model.hidden_size).values())
        assert predicted == actual, (
            f"mixers.{mixer}: {predicted} parameters predicted, {actual} built"
        )
    actual = sum(shard.value.numel() for shard in shards.values())
    predicted = sum(predicted_parameters(config).values())
    assert predicted == actual, f"{predicted} parameters predicted, {actual} built"


def check_no_leak(case: Case, layout: Layout) -> None:
    """Changing one document leaves the others' logits as they are, bit for bit; so does changing a
    token for those before it."""
    lengths = case.documents[0]
    tokens = _random_tokens(case, sum(lengths))
    starts = np.cumsum([0, *lengths])
    streams = [(tokens, lengths)]
    for i in range(len(lengths)):
        changed = tokens.copy()
        changed[starts[i] : starts[i + 1]] += 1  # below the vocabulary, see _random_tokens
        streams.append((changed, lengths))
    middle = starts[2] + lengths[2] // 2
    changed = tokens.copy()
    changed[middle] += 1
    streams.append((changed, lengths))
    before, *others, later = _logits(case, layout, streams)
    for i, after in enumerate(others):
        moved = (before != after).any(dim=1)
        inside = torch.zeros(len(tokens), dtype=torch.bool)
        inside[starts[i] : starts[i + 1]] = True
        assert moved[inside].all(), f"document {i} does not see its own tokens"
        assert not moved[~inside].any(), f"document {i} reaches tokens {_where(moved & ~inside)}"
    moved = (before != later).any(dim=1)
    assert not moved[:middle].any(), f"token {middle} reaches back to {_where(moved[:middle])}"
    assert not moved[starts[3] :].any(), f"token {middle} reaches the next document"


def check_documents_alone(case: Case) -> None:
    """A document gives the same logits alone as packed with others."""
    lengths = case.documents[0]
    tokens = _random_tokens(case, sum(lengths))
    starts = np.cumsum([0, *lengths])
    alone = [(tokens[starts[i] : starts[i + 1]], (n,)) for i, n in enumerate(lengths)]
    packed, *singles = _logits(case, ONE_RANK, [(tokens, lengths), *alone])
    for i, single in enumerate(singles):
        _assert_close(packed[starts[i] : starts[i + 1]], single, f"document {i}")


def check_reshard(case: Case, layout: Layout, folder: Path) -> None:
    """A checkpoint of one rank is the same model under a layout, and so is one saved there."""
    path, layouts, start = None, [ONE_RANK, layout, ONE_RANK], results_of(case, layout)
    saved = []
    for number, each in enumerate(layouts, start=1):
        ranks = run_on_ranks(each.world_size, saved_and_loaded, case, each, path, folder, number)
        path = ranks[0][0]
        saved.append(ranks)
    (_, original, logits), *_ = saved[0]
    for rank, (_, shards, _) in enumerate(saved[1]):
        for name, shard in shards.items():
            expected = local_slice(original[name].value, shard, start[rank])
            assert torch.equal(shard.value, expected), f"rank {rank} loads {name} differently"
    for _, _, others in saved[1]:
        _assert_close(torch.cat(others), torch.cat(logits), "logits of the loaded model")
    (_, back, logits_back), *_ = saved[2]
    for name, shard in back.items():
        assert torch.equal(shard.value, original[name].value), f"{name} does not come back"
    assert torch.equal(torch.cat(logits_back), torch.cat(logits)), "logits do not come back"


def check_padding(case: Case, layout: Layout, unpadded: Case) -> None:
    """Vocabulary padding changes neither the loss nor any gradient, and gets none itself."""
    reference = results_of(unpadded, ONE_RANK)[0]
    for result in results_of(case, layout):
        for name, shard in result.shards.items():
            if shard.used_rows is None:
                continue
            rows = len(shard.value)
            used = min(max(shard.used_rows - result.tensor_rank * rows, 0), rows)
            assert not shard.value[used:].any(), f"{name}: padding does not start at zero"
            assert not gradient(shard)[used:].any(), f"{name}: padding has a gradient"
            first = result.tensor_rank * rows
            wanted = gradient(reference.shards[name])[first : first + used]
            _assert_close(gradient(shard)[:used], wanted, f"gradient of {name}")
    check_loss(reference, results_of(case, layout))
    limit = case.config(layout).optimizer.clip_grad_norm
    check_gradient_norm(limit, reference, results_of(case, layout))


def local_slice(full: Tensor, shard: Shard, result: RankResult) -> Tensor:
    """The part of a full parameter (or its gradient) that this rank holds."""
    if shard.tensor_dim is None:
        return full
    sizes = list(shard.components.values()) or [full.shape[shard.tensor_dim]]
    parts = full.split(sizes, dim=shard.tensor_dim)
    mine = [p.chunk(result.tensor_size, shard.tensor_dim)[result.tensor_rank] for p in parts]
    return torch.cat(mine, dim=shard.tensor_dim)


def components(local: Tensor, shard: Shard, result: RankResult) -> tuple[Tensor, ...]:
    if not shard.components:
        return (local,)
    sizes = [size // result.tensor_size for size in shard.components.values()]
    return local.split(sizes, dim=shard.tensor_dim or 0)


def _all_shards(reference: RankResult, results: list[RankResult]):
    """(rank, name, shard, result) of everything held, after checking that all is held."""
    held = {name for result in results for name in result.shards}
    assert held == set(reference.shards), f"not held alike: {held ^ set(reference.shards)}"
    for rank, result in enumerate(results):
        for name, shard in result.shards.items():
            yield rank, name, shard, result


def gradient(shard: Shard) -> Tensor:
    assert shard.gradient is not None
    return shard.gradient


def local_tokens(stream: Tensor, result: RankResult, micro_batches: int) -> Tensor:
    """This rank's rows of [all tokens of all sequences, ...]: micro-batches dealt to data ranks in
    turn, each split over context ranks."""
    shape = (micro_batches, result.data_size, result.context_size, -1)
    return stream.unflatten(0, shape)[:, result.data_rank, result.context_rank].flatten(0, 1)


def _logits(case: Case, layout: Layout, streams: list) -> list[Tensor]:
    """Logits [T, V] of each stream, put together from the context ranks."""
    results = run_on_ranks(layout.world_size, logits_of_streams, case, layout, streams)
    shares = results[:: layout.parallel.tensor]
    return [torch.cat(parts) for parts in zip(*shares, strict=True)]


def _random_tokens(case: Case, count: int) -> np.ndarray:
    vocab_size = case.config(ONE_RANK).model.vocab_size
    return np.random.default_rng(11).integers(0, vocab_size - 1, count)


def _where(moved: Tensor) -> list[int]:
    return moved.nonzero()[:, 0].tolist()


def _assert_close(actual: Tensor, wanted: Tensor, what: str) -> None:
    assert actual.shape == wanted.shape, f"{what}: {list(actual.shape)}, not {list(wanted.shape)}"
    error, size = float((actual - wanted).norm()), float(wanted.norm())
    assert error <= TOLERANCE * size, f"{what}: error {error:.2e} of {size:.2e}"
