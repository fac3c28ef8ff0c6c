"""Times the delta rule on the GPU beside flash-linear-attention's and FlashQLA's, in one run.

    python -m mixtron.kernels.delta_rule.bench [--kernels] [--sweep] [--alone]

Prints forward, forward + backward, and the memory that they need beyond their inputs,
from raw q, k, v and gate logits, as a mixer has them; and the decode step. Nothing is checked here:
`tests/kernels/test_gpu_delta_rule.py` does that.
"""

# Arguments are passed on as lists.
# pyright: reportCallIssue=false, reportArgumentType=false

import argparse
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mixtron.kernels import measure
from mixtron.kernels.delta_rule import (
    delta_rule,
    delta_rule_decode,
    delta_rule_segment_map,
    triton_plan,
)
from mixtron.kernels.delta_rule.gates import decay_and_step_size
from mixtron.kernels.delta_rule.triton_plan import Launch

SHAPES = ((8, 4096, 16), (1, 32768, 32), (1, 131072, 16))
WIDTH = 128
DECODE_BATCHES = (1, 32, 256)


def make_inputs(shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """q, k, v and the logits in bf16, the decay's parameters in fp32."""
    B, T, H = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    inputs = {name: draw(B, T, H, WIDTH) for name in ("q", "k", "v")}
    inputs |= {name: draw(B, T, H) for name in ("decay", "step")}
    inputs["rate"] = torch.full((H,), 1.0, device="cuda")
    inputs["bias"] = torch.full((H,), -4.0, device="cuda")
    return {name: x.requires_grad_() for name, x in inputs.items()}


def gates(decay: Tensor, step: Tensor, rate: Tensor, bias: Tensor) -> list[Tensor]:
    rows = (x.reshape(-1, 1, x.shape[-1]) for x in (decay, step))
    return [x.view(decay.shape) for x in decay_and_step_size(*rows, rate, bias)]


def ours(q, k, v, decay, step, rate, bias) -> Tensor:
    log_decay, eta = gates(decay, step, rate, bias)
    options = {"step_size": "kaczmarz", "unit_queries": True, "backend": "triton"}
    return delta_rule(q, k, v, log_decay, eta, **options)[0]  # pyright: ignore


def peer(q, k, v, decay, step, rate, bias) -> Tensor:
    """Its norms and gates in its own kernels; its refusal of Hopper with Triton 3.4 to 3.7 lifted,
    and its gradients not checked."""
    from fla.ops.common import chunk_o  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore

    chunk_o.TRITON_ABOVE_3_7_1 = True
    return chunk_gated_delta_rule(
        q, k, v, decay, step,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=rate, dt_bias=bias,
        use_beta_sigmoid_in_kernel=True,
    )[0]  # fmt: skip


def flash_qla(q, k, v, decay, step, rate, bias) -> Tensor:
    """Its norms in its own kernels; gates, which it has not, by this repository's."""
    from flash_qla import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    log_decay, eta = gates(decay, step, rate, bias)
    return chunk_gated_delta_rule(q, k, v, log_decay, eta, use_qk_l2norm_in_kernel=True)[0]


def compare(name: str, op: Callable[..., Tensor]) -> None:
    """A line for each shape; what cannot run gets one too."""
    print(f"\n{name}, K = V = {WIDTH}: B, T, H; forward ms, with backward, extra MiB\n")
    for shape in SHAPES:
        inputs = make_inputs(shape)
        try:
            found = measure.forward_and_backward(lambda: op(**inputs), list(inputs.values()))  # noqa: B023
        except Exception as error:
            print(f"- {shape}: {type(error).__name__}: {str(error)[:60]}", flush=True)
            continue
        print(f"- {shape}: {found[0]:.3f}, {found[1]:.3f}, {found[2]:,.0f}", flush=True)


def own_step(state, q, k, v, decay, step, rate, bias) -> None:
    token = (x[:, 0] for x in (q, k, v, decay))
    delta_rule_decode(state, *token, rate, bias, step[:, 0], step_size="kaczmarz")


def peers_step(state, q, k, v, decay, step, rate, bias) -> None:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # pyright: ignore

    fused_recurrent_gated_delta_rule(
        q, k, v, decay, beta=step, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=rate, dt_bias=bias,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def decode(name: str, step: Callable[..., None]) -> None:
    """Tokens a second of one layer of 16 heads."""
    print(f"\n{name}, one token, H = 16: batch; us, tokens/s\n")
    for batch in DECODE_BATCHES:
        inputs = {name: x.detach() for name, x in make_inputs((batch, 1, 16)).items()}
        state = torch.zeros(batch, 16, WIDTH, WIDTH, device="cuda")
        ms = measure.time_ms(lambda: step(state, **inputs), repeats=30)  # noqa: B023
        print(f"- {batch}: {1000 * ms:.1f}, {1000 * batch / ms:,.0f}", flush=True)


def segment_maps() -> None:
    """What context ranks exchange, beside the form in torch."""
    print("\nThe map of a segment, H = 8: form, T; forward ms, with backward, extra MiB\n")
    for backend, T in (("triton", 8192), ("triton", 65536), ("chunk", 8192)):
        _, k, v, decay, step, rate, bias = make_inputs((1, T, 8)).values()
        log_decay, eta = (x.detach().requires_grad_() for x in gates(decay, step, rate, bias))
        leaves = [k, v, log_decay, eta]

        def run(leaves=leaves, backend=backend):
            maps = delta_rule_segment_map(*leaves, step_size="kaczmarz", backend=backend)
            return torch.cat(maps, dim=-1)

        found = measure.forward_and_backward(run, leaves)
        print(f"- {backend}, {T}: {found[0]:.3f}, {found[1]:.3f}, {found[2]:,.0f}", flush=True)


def kernels(shape: tuple[int, int, int]) -> None:
    """Each kernel's time, by torch's profiler."""
    inputs = make_inputs(shape)
    grad = torch.randn_like(ours(**inputs))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(4):
            torch.autograd.grad(ours(**inputs), list(inputs.values()), grad)
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.device_time_total > 40]
    events.sort(key=lambda e: -e.device_time_total)
    rows = [[e.key[:60], e.device_time_total / 4000] for e in events]
    print(f"\n{shape}, kernels\n\n{measure.table(('kernel', 'ms'), rows)}", flush=True)


SWEEP = {
    "prepare": [Launch(4), Launch(4, registers=168), Launch(4, registers=128)],
    "scan": [Launch(8, stages) for stages in (1, 2, 3)] + [Launch(4, 2, 64)],
    "maps": [Launch(8, stages) for stages in (1, 2, 3)] + [Launch(4, 2, 64)],
    "reverse": [Launch(8, stages) for stages in (1, 2, 3)],
    "pairs": [Launch(4, stages, 64) for stages in (1, 2)] + [Launch(4)],
    "states": [Launch(4, stages, 64, 64) for stages in (1, 2, 3)] + [Launch(4, 2, 128, 64)],
    "gradient": [Launch(4, 1, block_v, 64) for block_v in (64, 128)],
}
"""What --sweep launches each kernel with, the others as they are."""


def sweep(shape: tuple[int, int, int]) -> None:
    """The op with each launch, and how far the gradients move."""
    inputs = make_inputs(shape)
    leaves = list(inputs.values())
    grad = torch.randn_like(ours(**inputs))

    def both():
        return torch.autograd.grad(ours(**inputs), leaves, grad)

    base, expected = triton_plan.PLANS[90], both()
    print(f"\n{shape}, launch: forward + backward ms, MiB, moved\n")
    for part, launches in SWEEP.items():
        for launch in launches:
            triton_plan.PLANS[90] = dataclasses.replace(base, **{part: launch})
            try:
                ms, mib, found = measure.time_ms(both, 2, 7), measure.extra_mib(both), both()
            except Exception as error:
                print(f"- {part} {launch}: {str(error)[:60]}", flush=True)
                continue
            moved = (float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
            print(f"- {part} {launch}: {ms:.3f}, {mib:,.0f}, {max(moved):.1e}", flush=True)
    triton_plan.PLANS[90] = base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", action="store_true", help="each kernel's time too")
    parser.add_argument("--sweep", action="store_true", help="launches too")
    parser.add_argument("--alone", action="store_true", help="without the peer")
    options = parser.parse_args()
    print(measure.versions(), flush=True)
    if not options.alone:
        compare("Gated delta rule, flash-linear-attention", peer)
        compare("Gated delta rule, FlashQLA", flash_qla)
    compare("KLA, this op", ours)
    for shape in SHAPES if options.kernels else ():
        kernels(shape)
    decode("KLA, this op", own_step)
    segment_maps()
    for shape in SHAPES if options.sweep else ():
        sweep(shape)
    if not options.alone:
        decode("Gated delta rule, flash-linear-attention", peers_step)


if __name__ == "__main__":
    main()
