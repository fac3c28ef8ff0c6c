"""Times SwiGLU: `python -m mixtron.kernels.swiglu.bench`."""

import torch

from mixtron.kernels.measure import forward_and_backward, table, versions
from mixtron.kernels.swiglu import swiglu

TOKENS, WIDTH = 32768, 2816


def main() -> None:
    joined = torch.randn(TOKENS, 1, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
    joined.requires_grad_()
    compiled = torch.compile(lambda x: swiglu(x, backend="torch"))
    forms = {
        "torch form": lambda: swiglu(joined, backend="torch"),
        "triton form": lambda: swiglu(joined, backend="triton"),
        "torch form, compiled": lambda: compiled(joined),
    }
    rows = [(name, *forward_and_backward(form, (joined,))) for name, form in forms.items()]
    print(f"{versions()}; {TOKENS:,} tokens, {WIDTH} channels, bf16\n")
    print(table(("form", "fwd ms", "fwd+bwd ms", "extra MiB"), rows))


if __name__ == "__main__":
    main()
