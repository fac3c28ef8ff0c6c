"""From one layer's mixer and weights to another's: what each piece of surgery does to a layer.

A layer is its mixer's config and its tensors by their names in a checkpoint. Weights that the input
norm's gain multiplies are decomposed with it and divided by it afterwards.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.launch.spectral.weights import SpectralError, repeat_to
from mixtron.megatron_ext.mixers.base import MixerConfig
from mixtron.megatron_ext.mixers.linear_attention.config import Config as LinearAttention
from mixtron.megatron_ext.mixers.sd_attention.config import Config as SDAttention
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxAttention

QUERY, KEY, VALUE = (f"in_proj.weight.{part}" for part in ("query", "key", "value"))
DAMPING, DAMPING_BIAS, OUTPUT = "in_proj.weight.damping", "damping_bias", "out_proj.weight"
NO_DAMPING = -30.0
"""softplus of it is 1e-13."""


@dataclass(frozen=True)
class Layer:
    mixer: MixerConfig
    tensors: dict[str, Tensor]
    gain_D: Tensor | None = None
    """The input norm's."""

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_Q, W_K, W_V [H, K, D], keys and values repeated over the queries that share them."""
        mixer = self.attention()
        groups = mixer.kv_heads if isinstance(mixer, SoftmaxAttention) else mixer.heads
        q_HKD = self.tensors[QUERY].float().unflatten(0, (mixer.heads, -1))
        k_GKD, v_GKD = (self.tensors[n].float().unflatten(0, (groups, -1)) for n in (KEY, VALUE))
        return q_HKD, repeat_to(k_GKD, mixer.heads), repeat_to(v_GKD, mixer.heads)

    def attention(self) -> SDAttention | SoftmaxAttention:
        """The mixer, if its scores are products of projections and of nothing else.

        Raises:
            SpectralError: it is of another type, normalises q and k, or has a window.
        """
        mixer = self.mixer
        if not isinstance(mixer, SDAttention | SoftmaxAttention):
            raise SpectralError(f"a layer is {mixer.type}; this needs softmax or S-D attention")
        if isinstance(mixer, SoftmaxAttention) and (mixer.qk_norm or mixer.window is not None):
            raise SpectralError("softmax_attention with qk_norm or window has no such mapping")
        return mixer

    def unrotated(self, what: str) -> SDAttention | SoftmaxAttention:
        """Raises SpectralError where RoPE ties channels to frequencies, which `what` mixes up."""
        mixer = self.attention()
        if mixer.rope_base is not None:
            raise SpectralError(
                f"{what} mixes a head's channels, which RoPE ties to frequencies; it needs "
                "rope_base=null"
            )
        return mixer


def linearised(layer: Layer) -> Layer:
    """ELU+1 linear attention whose features see what the scores were products of.

    Softmax attention's q and k, and S-D attention's [q; -k] and [k; q]; each with half of the scale
    K^-1/2. Values and the output projection stay.
    """
    mixer = layer.attention()
    q_HKD, k_HKD, v_HVD = layer.heads()
    if isinstance(mixer, SDAttention):
        q_HKD, k_HKD = torch.cat([q_HKD, -k_HKD], dim=1), torch.cat([k_HKD, q_HKD], dim=1)
    half_scale = mixer.head_dim**-0.25
    config = LinearAttention(heads=mixer.heads, key_dim=q_HKD.shape[1], value_dim=mixer.head_dim)
    return _with_heads(layer, config, half_scale * q_HKD, half_scale * k_HKD, v_HVD)


def without_routing(layer: Layer) -> Layer:
    """S-D attention with S = 0 (W_Q = 0); softmax attention with the symmetric part of its scores.

    The latter is (q.k' + k.q')/2: heads of twice the width, their values filled up with zeros.
    """
    if isinstance(layer.mixer, SDAttention):
        return _changed(layer, {QUERY: torch.zeros_like(layer.tensors[QUERY])})
    mixer = layer.unrotated("the symmetric part")
    q_HKD, k_HKD, v_HVD = layer.heads()
    config = SoftmaxAttention(
        heads=mixer.heads, kv_heads=mixer.heads, head_dim=2 * mixer.head_dim, rope_base=None
    )
    # Scores get (2K)^-1/2 instead of K^-1/2.
    q_HED = torch.cat([q_HKD, k_HKD], dim=1) / math.sqrt(2)
    wide = _with_heads(
        layer,
        config,
        q_HED,
        torch.cat([k_HKD, q_HKD], dim=1),
        torch.cat([v_HVD, torch.zeros_like(v_HVD)], dim=1),
    )
    o_DHV = layer.tensors[OUTPUT].float().unflatten(1, (mixer.heads, -1))
    o_DHE = torch.cat([o_DHV, torch.zeros_like(o_DHV)], dim=-1)
    return _changed(wide, {OUTPUT: o_DHE.flatten(1)})


def without_filtering(layer: Layer) -> Layer:
    """S-D attention with D = 0; softmax attention with the skew part of its scores alone.

    The latter is S-D attention: S = (q.k' - k.q')/2, D = 0.
    """
    if isinstance(layer.mixer, SDAttention):
        return with_damping(layer, torch.full((layer.mixer.heads,), NO_DAMPING))
    mixer = layer.attention()
    q_HKD, k_HKD, v_HVD = layer.heads()
    config = SDAttention(
        heads=mixer.heads, head_dim=mixer.head_dim, d="head", rope_base=mixer.rope_base
    )
    skew = _with_heads(layer, config, q_HKD / 2, k_HKD, v_HVD)
    return _changed(skew, {DAMPING_BIAS: torch.full((mixer.heads,), NO_DAMPING)})


def with_damping(layer: Layer, bias_H: Tensor) -> Layer:
    """S-D attention with one d = softplus(bias) a head."""
    mixer = layer.mixer
    assert isinstance(mixer, SDAttention)
    tensors = {n: x for n, x in layer.tensors.items() if n != DAMPING} | {DAMPING_BIAS: bias_H}
    return Layer(mixer.model_copy(update={"d": "head"}), tensors, layer.gain_D)


def truncated(layer: Layer, rank: int) -> Layer:
    """S-D attention whose S keeps its `rank` / 2 strongest planes of rotation, in every head."""
    if not isinstance(layer.unrotated("truncation"), SDAttention) or rank % 2 or rank < 2:
        raise SpectralError(f"rank {rank}: S of S-D attention has even ranks, 2 a plane")
    q_HKD, k_HKD, v_HVD = layer.heads()
    K = q_HKD.shape[1]
    q_HPD, k_HPD = _strongest(layer, q_HKD, k_HKD, min(rank // 2, K))
    rows = K - q_HPD.shape[1]
    q_HKD, k_HKD = (torch.nn.functional.pad(x, (0, 0, 0, rows)) for x in (q_HPD, k_HPD))
    return _with_heads(layer, layer.mixer, q_HKD, k_HKD, v_HVD)


def narrowed(layer: Layer, width: int) -> Layer:
    """Heads of another width, that come as near as they can: the strongest planes of S (or singular
    values of the scores' matrix), and of each head's W_O W_V."""
    mixer = layer.unrotated("projection")
    q_HKD, k_HKD, v_HVD = layer.heads()
    q_HKD, k_HKD = _strongest(layer, q_HKD, k_HKD, width)
    o_HDV = layer.tensors[OUTPUT].float().unflatten(1, (mixer.heads, -1)).transpose(0, 1)
    v_HVD, o_HVD = strongest_products(_folded(layer, v_HVD), o_HDV.mT, width)
    # The scale is that of the new width.
    half_scale = (width / mixer.head_dim) ** 0.25
    change = {"head_dim": width}
    if isinstance(mixer, SoftmaxAttention):
        change["kv_heads"] = mixer.heads
    config = mixer.model_copy(update=change)
    new = _with_heads(
        layer, config, half_scale * q_HKD, half_scale * k_HKD, _unfolded(layer, v_HVD)
    )
    return _changed(new, {OUTPUT: o_HVD.permute(2, 0, 1).flatten(1)})


def _strongest(layer: Layer, q_HKD: Tensor, k_HKD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[H, count, D] each: what of the scores' matrix is largest, the norm's gain seen."""
    choose = strongest_planes if isinstance(layer.mixer, SDAttention) else strongest_products
    q_HPD, k_HPD = choose(_folded(layer, q_HKD), _folded(layer, k_HKD), count)
    return _unfolded(layer, q_HPD), _unfolded(layer, k_HPD)


def strongest_planes(q_HKD: Tensor, k_HKD: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """q, k [H, planes, D] whose q^T k - k^T q is the best skew matrix of that rank.

    i S is Hermitian: an eigenvalue w > 0 with eigenvector x + i y is the plane 2w (y x^T - x y^T).
    """
    K = q_HKD.shape[1]
    basis_HDE, triangle = torch.linalg.qr(torch.cat([q_HKD, k_HKD], dim=1).double().mT)
    core_HEE = triangle[..., :K] @ triangle[..., K:].mT
    values_HE, vectors = torch.linalg.eigh(1j * (core_HEE - core_HEE.mT))
    size_HP = (2 * values_HE[:, -planes:].clamp(min=0)).sqrt()
    vectors = vectors[..., -planes:]
    q, k = (
        (basis_HDE @ (x * size_HP[:, None])).mT.to(q_HKD.dtype)
        for x in (vectors.imag, vectors.real)
    )
    return q.flip(1), k.flip(1)


def strongest_products(a_HKD: Tensor, b_HKE: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """a, b [H, count, ...] whose a^T b is the best matrix of that rank."""
    a_basis, a_triangle = torch.linalg.qr(a_HKD.double().mT)
    b_basis, b_triangle = torch.linalg.qr(b_HKE.double().mT)
    left, size, right = torch.linalg.svd(a_triangle @ b_triangle.mT)
    root_HP = size[:, :count].sqrt()
    a = (a_basis @ (left[..., :count] * root_HP[:, None])).mT
    b = (b_basis @ (right.mT[..., :count] * root_HP[:, None])).mT
    return a.to(a_HKD.dtype), b.to(b_HKE.dtype)


def _folded(layer: Layer, x_HKD: Tensor) -> Tensor:
    return x_HKD if layer.gain_D is None else x_HKD * layer.gain_D.float()


def _unfolded(layer: Layer, x_HKD: Tensor) -> Tensor:
    if layer.gain_D is None:
        return x_HKD
    gain_D = layer.gain_D.float()
    # A channel that the norm blocks reaches nothing, whatever its weight is.
    return torch.where(gain_D == 0, 0.0, x_HKD / torch.where(gain_D == 0, 1.0, gain_D))


def _with_heads(layer: Layer, mixer: MixerConfig, q: Tensor, k: Tensor, v: Tensor) -> Layer:
    """Another mixer with these heads [H, K, D]; everything it does not have is dropped."""
    tensors = {QUERY: q.flatten(0, 1), KEY: k.flatten(0, 1), VALUE: v.flatten(0, 1)}
    kept = [OUTPUT]
    if isinstance(mixer, SDAttention):
        kept += [name for name in (DAMPING, DAMPING_BIAS) if name in layer.tensors]
    return Layer(mixer, tensors | {name: layer.tensors[name] for name in kept}, layer.gain_D)


def _changed(layer: Layer, tensors: dict[str, Tensor]) -> Layer:
    return Layer(layer.mixer, layer.tensors | tensors, layer.gain_D)
