"""S, D and L of real text: the interactions of a model's heads over the tokens of one sequence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.kernels.sd_attention import interaction
from mixtron.launch.checkpoint import load_weights
from mixtron.launch.config import RunConfig
from mixtron.launch.config_sections import DataConfig
from mixtron.launch.spectral.heads import SMALL, HeadSpectrum, effective_rank, head_spectra
from mixtron.launch.spectral.huggingface import read_config
from mixtron.launch.spectral.huggingface_text import attention_inputs, text_ids
from mixtron.launch.spectral.report import Spectra
from mixtron.launch.spectral.runs import config_of, is_run, newest_checkpoint
from mixtron.launch.spectral.weights import SpectralError
from mixtron.megatron_ext.batch import make_batch
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.model import build_model, forward
from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel


@torch.no_grad()
def measure_text(model: Path, text: Path, tokens: int) -> Spectra:
    """Spectra of the unmasked interactions over the first `tokens` tokens of a text.

    Queries and keys are those that attention sees, RoPE and norms included, and the scale K^-1/2 is
    in the eigenvalues: of S - D for S-D attention, of the scores for softmax attention.

    Args:
        model: a run, one of its checkpoints, or a Hugging Face folder with its tokenizer.json.
    Raises:
        SpectralError: none of these, or a text that is too short.
    """
    name, family, heads, count = (_of_run if is_run(model) else _of_folder)(model, text, tokens)
    notes = [f"over {count} tokens of {text.name}, unmasked; eigenvalues with the scale"]
    return Spectra(f"{name} on {text.name}", family, heads, notes)


Found = tuple[str, str, dict[int, list[HeadSpectrum]], int]
"""Name and family of a model, its heads by layer, and the number of tokens."""


def _of_run(model: Path, text: Path, tokens: int) -> Found:
    checkpoint = newest_checkpoint(model)
    config = config_of(checkpoint)
    if not isinstance(config.data, DataConfig):
        raise SpectralError(f"{model}: trained on a synthetic task, it has no tokenizer for a text")
    tokenizer = load_tokenizer(config.data.tokenizer, eod_token=config.data.eod_token)
    ids = tokenizer.encode_batch([text.read_text()])[0][:tokens]
    if len(ids) < 2:
        raise SpectralError(f"{text}: {len(ids)} tokens; at least 2 are needed")
    heads = _heads_over(checkpoint, config, torch.as_tensor(ids.astype("int64"))[None])
    return config.name, "mixtron", heads, len(ids)


def _of_folder(model: Path, text: Path, tokens: int) -> Found:
    family, ids_T = read_config(model)["model_type"], text_ids(model, text, tokens)
    heads = {
        layer: _of_scores(q_HTK.mT, k_HTK.mT, q_HTK.shape[-1] ** -0.5, sd=False)
        for layer, (q_HTK, k_HTK) in enumerate(attention_inputs(model, ids_T))
    }
    return model.name, family, heads, len(ids_T)


def _heads_over(
    checkpoint: Path, config: RunConfig, ids_BT: Tensor
) -> dict[int, list[HeadSpectrum]]:
    device = init_distributed()
    ranks = init_model_parallel(seed=0, device=device)
    tokens = ids_BT.shape[1]
    (chunk,) = build_model(
        config.model, config.mixers, ParallelConfig(), ranks, seed=0, bf16=False, max_tokens=tokens
    )
    load_weights(checkpoint, [chunk], ranks)
    chunk.eval()
    found: dict[int, list[HeadSpectrum]] = {}

    def measure(module, arguments, keywords):
        q_THK, k_THK, *rest = module.attention_inputs(arguments[0], keywords["packed_seq_params"])
        found[module.layer_number - 1] = _spectra(module.mixer, q_THK, k_THK, rest)

    layers: Any = chunk.decoder.layers
    for layer in layers:
        if hasattr(layer.self_attention, "attention_inputs"):
            layer.self_attention.register_forward_pre_hook(measure, with_kwargs=True)
    batch = make_batch([tokens], step=0, device=device)
    forward(chunk, config.model, ranks, ids_BT.to(device), batch)
    torch.distributed.destroy_process_group()
    return found


def _spectra(mixer, q_THK: Tensor, k_THK: Tensor, rest: list[Tensor]) -> list[HeadSpectrum]:
    """Over tokens instead of channels: queries and keys [H, K, T]."""
    scale = mixer.head_dim**-0.5
    k_THK = k_THK.repeat_interleave(q_THK.shape[1] // k_THK.shape[1], dim=1)
    sd = mixer.type == "sd_attention"
    spectra = _of_scores(q_THK.permute(1, 2, 0), k_THK.permute(1, 2, 0), scale, sd=sd)
    if not sd:
        return spectra
    _, d_TH = rest
    L_HTT = interaction(q_THK.double(), k_THK.double(), d_TH.double(), scale=scale)
    return [_with_damping(head, L) for head, L in zip(spectra, L_HTT, strict=True)]


def _of_scores(q_HKT: Tensor, k_HKT: Tensor, scale: float, *, sd: bool) -> list[HeadSpectrum]:
    return head_spectra(scale**0.5 * q_HKT, scale**0.5 * k_HKT, sd=sd)


def _with_damping(head: HeadSpectrum, L_TT: Tensor) -> HeadSpectrum:
    """The eigenvalues of S - D in place of those of S; filtering is the diagonal D alone."""
    d_T = -L_TT.diagonal()
    eigenvalues = sorted(torch.linalg.eigvals(L_TT).tolist(), key=lambda x: (-x.real, -x.imag))
    routing, filtering = (L_TT + d_T.diag()).square().sum(), d_T.square().sum()
    return replace(
        head,
        routing_share=float(routing / (routing + filtering)),
        filtering_rank=effective_rank(d_T),
        filtering_count=int((d_T > SMALL * d_T.max()).sum()),
        largest_real=eigenvalues[0].real,
        eigenvalues=eigenvalues,
    )
