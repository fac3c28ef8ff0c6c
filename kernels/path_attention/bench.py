"""Times PaTH, PaTH-FoX and FoX beside torch's attention and their peers, on one GPU, in one run.

python -m mixtron.kernels.path_attention.bench [--sweep] [--width 128]
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixtron.kernels import measure
from mixtron.kernels.path_attention import path_attention, triton_op
from mixtron.kernels.path_attention.triton_plan import Launch, Plan

SHAPES = ((8, 4096, 16), (1, 32768, 16))
SWEEP = [
    *((which, 64, 8, stages) for which in ("forward", "keys", "queries") for stages in (1, 2, 3)),
    *((which, 64, 4, 2) for which in ("forward", "keys", "queries")),
    *((which, 32, 8, 3) for which in ("forward", "keys", "queries")),
    ("forward", 128, 8, 2),
]
"""Which launches --sweep times: kernel, block, warps, stages."""
LONGEST = (1, 131072, 16)
FORMS = {"FoX": "g", "PaTH": "wb", "PaTH-FoX": "wbg"}


def make_inputs(shape: tuple[int, int, int], width: int, form: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    B, T, H = shape

    def draw(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=dtype)

    inputs = {n: draw(B, T, H, width, dtype=torch.bfloat16) for n in ("q_BTHK", "k_BTGK", "v_BTGV")}
    if "w" in form:
        inputs["w_BTGK"] = F.normalize(draw(B, T, H, width), dim=-1)
        inputs["beta_BTG"] = 2 * draw(B, T, H).sigmoid()
    if "g" in form:
        inputs["log_forget_BTH"] = F.logsigmoid(draw(B, T, H) + 4)
    return {n: x.requires_grad_() for n, x in inputs.items()}


def ours(inputs: dict[str, Tensor]) -> Tensor:
    return path_attention(**inputs, backend="triton")  # pyright: ignore[reportArgumentType]


def torch_attention(backend: SDPBackend) -> Callable[[dict[str, Tensor]], Tensor]:
    def run(inputs: dict[str, Tensor]) -> Tensor:
        q, k, v = (inputs[n].transpose(1, 2) for n in ("q_BTHK", "k_BTGK", "v_BTGV"))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return run


def peer(inputs: dict[str, Tensor]) -> Tensor:
    """flash-linear-attention's."""
    q, k, v = (inputs[n] for n in ("q_BTHK", "k_BTGK", "v_BTGV"))
    gate = inputs.get("log_forget_BTH")
    if "w_BTGK" in inputs:
        from fla.ops.path_attn import parallel_path_attn  # pyright: ignore

        return parallel_path_attn(q, k, v, inputs["w_BTGK"], inputs["beta_BTG"], gate)[0]
    from fla.ops.forgetting_attn import parallel_forgetting_attn  # pyright: ignore

    return parallel_forgetting_attn(q, k, v, gate)


def row(name: str, run, inputs: dict[str, Tensor], base: float | None) -> list:
    """Name, forward ms, forward + backward ms, its ratio to `base`, extra MiB; or the error."""
    try:
        found = measure.forward_and_backward(lambda: run(inputs), list(inputs.values()))
    except Exception as error:  # a peer that cannot run is a row too
        return [name, f"{type(error).__name__}: {str(error)[:60]}", "", "", ""]
    forward_ms, both_ms, mib = found
    ratio = both_ms / base if base else 1.0
    return [name, forward_ms, both_ms, ratio, f"{mib:,.0f}"]


def compare(shape: tuple[int, int, int], width: int) -> None:
    print(f"\n(B, T, H) = {shape}, head size {width}\n")
    plain = make_inputs(shape, width, "")
    rows = [row("SDPA FlashAttention", torch_attention(SDPBackend.FLASH_ATTENTION), plain, None)]
    base = rows[0][2]
    rows.append(row("SDPA cuDNN", torch_attention(SDPBackend.CUDNN_ATTENTION), plain, base))
    rows.append(row("softmax, this op", ours, plain, base))
    del plain
    for name, form in FORMS.items():
        inputs = make_inputs(shape, width, form)
        rows.append(row(name, ours, inputs, base))
        rows.append(row(f"{name}, flash-linear-attention", peer, inputs, base))
    heads = ("op", "forward ms", "forward + backward ms", "of FlashAttention's", "extra MiB")
    print(measure.table(heads, rows), flush=True)


def longest(width: int) -> None:
    rows = []
    for name, form in FORMS.items():
        inputs = make_inputs(LONGEST, width, form)
        leaves = list(inputs.values())

        def both(inputs=inputs, leaves=leaves):
            o = ours(inputs)
            torch.autograd.grad(o, leaves, o)

        rows.append([name, measure.time_ms(both, 1, 2), f"{measure.extra_mib(both):,.0f}"])
    print(f"\n(B, T, H) = {LONGEST}, head size {width}\n")
    print(measure.table(["op", "forward + backward ms", "extra MiB"], rows), flush=True)


def sweep(width: int) -> None:
    """Forward, and forward and backward with a gate, of many launches, at 16 heads of 8,192."""
    inputs = make_inputs((1, 8192, 16), width, "g")
    leaves = list(inputs.values())
    plan = triton_op.launch_plan(torch.device("cuda"), width)
    grad = torch.randn_like(inputs["v_BTGV"])
    rows = []
    for which, block, warps, stages in SWEEP:
        choice = {"block": block, which: Launch(warps, stages)}
        triton_op.launch_plan = lambda *_, choice=choice: Plan(**(vars(plan) | choice))
        try:
            rows.append([which, block, warps, stages, phases(inputs, leaves, grad)[which]])
        except Exception as error:  # does not fit: a row that says so
            rows.append([which, block, warps, stages, type(error).__name__])
    print(f"\nhead size {width}\n")
    print(measure.table(("kernel", "block", "warps", "stages", "ms"), rows), flush=True)
    triton_op.launch_plan = lambda *_: plan


def phases(inputs: dict[str, Tensor], leaves: list[Tensor], grad: Tensor) -> dict[str, float]:
    """Milliseconds of each kernel, from torch's profiler."""
    kernels = {"forward": "forward_kernel", "keys": "key_kernel", "queries": "query_kernel"}
    torch.autograd.grad(ours(inputs), leaves, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            torch.autograd.grad(ours(inputs), leaves, grad)
        torch.cuda.synchronize()
    spent = {e.key: e.self_device_time_total / 3e3 for e in profile.key_averages()}
    return {which: spent[name] for which, name in kernels.items()}


def profile(shape: tuple[int, int, int], width: int, form: str) -> None:
    """Where the time of forward and backward goes."""
    inputs = make_inputs(shape, width, form)
    leaves, grad = list(inputs.values()), torch.randn_like(inputs["v_BTGV"])
    torch.autograd.grad(ours(inputs), leaves, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        torch.autograd.grad(ours(inputs), leaves, grad)
        torch.cuda.synchronize()
    spent = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:24]
    rows = [[e.key[:70], e.count, e.self_device_time_total / 1e3] for e in spent]
    print(f"\n{form} {shape}, head size {width}\n")
    print(measure.table(("kernel", "calls", "ms"), rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128, help="head size")
    parser.add_argument("--sweep", action="store_true", help="time launches instead")
    parser.add_argument("--profile", choices=FORMS, help="where a form's time goes instead")
    parser.add_argument("--longest", action="store_true", help=f"{LONGEST} as well")
    parser.add_argument("--workspace-mib", type=int, help="of PaTH's pieces, instead of the op's")
    options = parser.parse_args()
    if options.workspace_mib:
        triton_op.WORKSPACE_BYTES = options.workspace_mib * 2**20
    print(measure.versions(), flush=True)
    if options.sweep:
        sweep(options.width)
    elif options.profile:
        for shape in SHAPES:
            profile(shape, options.width, FORMS[options.profile])
    else:
        for shape in SHAPES:
            compare(shape, options.width)
        if options.longest:
            longest(options.width)


if __name__ == "__main__":
    main()
