"""Times the norms: `python -m mixtron.kernels.norms.bench`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.measure import forward_and_backward, table, versions
from mixtron.kernels.norms import rms_norm, unit_norm

TOKENS = 32768


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def main() -> None:
    rows = []
    for name, shape in (("hidden", (1024,)), ("hidden", (2048,)), ("heads", (8, 128))):
        x, weight, gate = noise(TOKENS, 1, *shape), noise(shape[-1]), noise(TOKENS, 1, *shape)
        weights = weight.shape

        def ours(backend, x=x, weight=weight):
            return rms_norm(x, weight, 1e-5, backend=backend)

        def gated(backend, x=x, weight=weight, gate=gate):
            return rms_norm(x, weight, 1e-5, gate=gate, backend=backend)

        def unit(backend, x=x):
            return unit_norm(x, backend=backend)

        for op, form, inputs in (
            ("rms_norm", ours, (x, weight)),
            ("gated rms_norm", gated, (x, weight, gate)),
            ("unit_norm", unit, (x,)),
        ):
            for backend in ("torch", "triton"):
                times = forward_and_backward(lambda f=form, b=backend: f(b), inputs)
                rows.append((op, f"{name} {list(shape)}", backend, *times))
        compiled = torch.compile(lambda x, w, g, s=weights: F.rms_norm(x, s, w, 1e-5) * F.silu(g))
        times = forward_and_backward(
            lambda f=compiled, x=x, w=weight, g=gate: f(x, w, g), (x, weight, gate)
        )
        rows.append(("gated rms_norm", f"{name} {list(shape)}", "torch.compile", *times))
    print(f"{versions()}; {TOKENS:,} tokens, bf16\n")
    print(table(("op", "rows", "form", "fwd ms", "fwd+bwd ms", "extra MiB"), rows))


if __name__ == "__main__":
    main()
