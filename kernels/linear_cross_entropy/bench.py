"""Times the loss: `python -m mixtron.kernels.linear_cross_entropy.bench`."""

import torch
import torch.nn.functional as F

from mixtron.kernels.linear_cross_entropy import linear_cross_entropy
from mixtron.kernels.measure import forward_and_backward, table, versions

TOKENS, WIDTH, VOCABULARY = 32768, 1024, 32000


def main() -> None:
    hidden_TD = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight_VD = (0.02 * weight_VD).requires_grad_()
    label_T = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    share_T = torch.ones(TOKENS, device="cuda")
    inputs, rows = (hidden_TD, weight_VD), []

    def plain():
        logits_TV = (hidden_TD @ weight_VD.t()).float()
        return F.cross_entropy(logits_TV, label_T, reduction="sum")

    rows.append(("torch, all logits in fp32", *forward_and_backward(plain, inputs)))
    for chunk_tokens in (1024, 2048, 4096, 8192, 32768):

        def chunked(chunk_tokens=chunk_tokens):
            return linear_cross_entropy(
                *inputs, label_T, share_T, used=VOCABULARY, chunk_tokens=chunk_tokens
            )

        rows.append((f"{chunk_tokens} tokens at a time", *forward_and_backward(chunked, inputs)))
    try:
        from fla.modules import FusedLinearCrossEntropyLoss  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        peer = FusedLinearCrossEntropyLoss(reduction="sum")
        times = forward_and_backward(lambda: peer(hidden_TD, label_T, weight_VD), inputs)
        rows.append(("fla's FusedLinearCrossEntropyLoss", *times))
    print(f"{versions()}; {TOKENS:,} tokens, width {WIDTH}, vocabulary {VOCABULARY:,}, bf16\n")
    print(table(("form", "fwd ms", "fwd+bwd ms", "extra MiB"), rows))


if __name__ == "__main__":
    main()
