"""What the GPU tests of ops with gates share."""

import torch

GATES = ("log_decay", "eta", "beta", "lambda")


def run(op, inputs, dtype):
    """Output and every gradient of sum(output * fixed noise); gates stay in fp32 or above."""
    gate_dtype = torch.promote_types(dtype, torch.float32)
    leaves = [
        x.detach().to(gate_dtype if name in GATES else dtype).requires_grad_()
        for name, x in inputs.items()
    ]
    output = op(*leaves)
    generator = torch.Generator("cuda").manual_seed(1)
    noise = torch.randn(output.shape, generator=generator, device="cuda").bfloat16()
    gradients = torch.autograd.grad((output * noise.to(output.dtype)).sum(), leaves)
    return {"output": output.detach(), **dict(zip(inputs, gradients, strict=True))}
