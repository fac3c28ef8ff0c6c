"""Token by token: what a layer keeps of a sequence, and the window of its newest token.

A random order over a document's own length is unknown while the document grows. Decoding draws it
for `decode_capacity` tokens instead: the slots around a new token's are then known when it arrives,
and hold those of its predecessors that lie there. With p tokens of C that is a share p/C of the
window (what a document of C tokens attends at its position p, exactly). Prefill does the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.windowed_attention import (
    WindowPlan,
    document_permutation,
    plan_windows,
    windowed_attention,
    windowed_attention_step,
)
from mixtron.megatron_ext.batch import EVALUATION_STEP, Batch
from mixtron.megatron_ext.cache import Cache, side_by_side
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.stochastic.config import Config


class Decoding:
    """The decoding of one layer.

    Plain order alone: a rolling cache of the last `window` tokens, position p in row p mod window.
    With a random order: all keys and values (any may lie beside a later token), of which a step
    reads `window` a path; and the order with its inverse.
    """

    def __init__(self, mixer: Config, layer_number: int):
        self.mixer = mixer
        self.layer_number = layer_number

    def fill(self, k_TGK: Tensor, v_TGK: Tensor, batch: Batch) -> None:
        """Keeps what later tokens of the sequences in the batch may attend."""
        kept, lengths = {"key": k_TGK, "value": v_TGK}, batch.lengths
        if self.mixer.paths == "swa":
            layer = {
                name: torch.stack([self._rolled(part) for part in x_TGK.split(lengths)])
                for name, x_TGK in kept.items()
            }
        else:
            order_BC = self._order(batch).expand(len(lengths), -1)
            layer = {name: side_by_side(x_TGK, lengths) for name, x_TGK in kept.items()}
            layer |= {"order": order_BC, "slot": order_BC.argsort()}
        _cache(batch).layers[self.layer_number] = layer

    def attend_random(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, batch: Batch) -> Tensor:
        """[T, H, K]. Each document in slots of its own, of which those of later tokens are
        empty."""
        order_C = _cache(batch).layers[self.layer_number]["order"][0]
        outputs = [
            windowed_attention(q, k, v, self._plan(order_C, len(q)), backend=self.mixer.kernel)
            for q, k, v in zip(
                *(x.split(batch.lengths) for x in (q_THK, k_TGK, v_TGK)), strict=True
            )
        ]
        return torch.cat(outputs)

    def _plan(self, order_C: Tensor, tokens: int) -> WindowPlan:
        return plan_windows(
            order_C,
            torch.tensor([0, len(order_C)], device=order_C.device),
            window=self.mixer.window,
            window_side=self.mixer.window_side,
            tokens=tokens,
            backend=self.mixer.kernel,
        )

    def step(self, q_BHK: Tensor, k_BGK: Tensor, v_BGK: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Each sequence's newest query against its own cached keys: [B, H, K] of each path."""
        cache = _cache(batch)
        if self.mixer.paths == "swa":
            return {"swa": self._step_rolling(q_BHK, k_BGK, v_BGK, cache)}
        k_BSGK = cache.append(self.layer_number, "key", k_BGK)
        v_BSGK = cache.append(self.layer_number, "value", v_BGK)
        self._check_room(k_BSGK.shape[1])
        attended = {"sa": self._random_window(cache), "swa": self._plain_window(cache)}
        return {
            path: windowed_attention_step(
                q_BHK, k_BSGK, v_BSGK, *attended[path], backend=self.mixer.kernel
            )
            for path in self.mixer.path_names()
        }

    def _order(self, batch: Batch) -> Tensor:
        capacity = self.mixer.decode_capacity
        self._check_room(batch.max_seqlen)
        device = batch.position_ids.device
        return document_permutation(
            torch.tensor([0, capacity], device=device),
            capacity,
            seed=self.mixer.seed,
            step=EVALUATION_STEP,
            layer=self.layer_number,
        )

    def _check_room(self, tokens: int) -> None:
        if tokens > self.mixer.decode_capacity:
            raise ConfigError(
                f"a sequence of {tokens} tokens exceeds decode_capacity="
                f"{self.mixer.decode_capacity} of a stochastic mixer: raise it, or decode less"
            )

    def _random_window(self, cache: Cache) -> tuple[Tensor, Tensor]:
        """[B, W] each: positions in the window of the newest tokens' slots; which are attended."""
        order_BC, slot_BC = (cache.layers[self.layer_number][name] for name in ("order", "slot"))
        before, after = self.mixer.reach()
        offset_W = torch.arange(-before, after + 1, device=order_BC.device)
        slot_BW = slot_BC.gather(1, cache.lengths[:, None]) + offset_W
        inside_BW = (slot_BW >= 0) & (slot_BW < order_BC.shape[1])
        position_BW = order_BC.gather(1, slot_BW.clamp(0, order_BC.shape[1] - 1))
        return position_BW, inside_BW & (position_BW <= cache.lengths[:, None])

    def _plain_window(self, cache: Cache) -> tuple[Tensor, Tensor]:
        age_W = torch.arange(self.mixer.window, device=cache.lengths.device)
        position_BW = cache.lengths[:, None] - age_W
        return position_BW, position_BW >= 0

    def _rolled(self, x_TGK: Tensor) -> Tensor:
        """The last `window` tokens, each in the row of its position mod window."""
        tokens, window = len(x_TGK), self.mixer.window
        if tokens < window:
            return F.pad(x_TGK, (0, 0, 0, 0, 0, window - tokens))
        return x_TGK[tokens - window :].roll(tokens % window, dims=0)

    def _step_rolling(self, q_BHK: Tensor, k_BGK: Tensor, v_BGK: Tensor, cache: Cache) -> Tensor:
        layer, window = cache.layers[self.layer_number], self.mixer.window
        sequence_B = torch.arange(len(q_BHK), device=q_BHK.device)
        row_W = torch.arange(window, device=q_BHK.device)
        layer["key"][sequence_B, cache.lengths % window] = k_BGK
        layer["value"][sequence_B, cache.lengths % window] = v_BGK
        age_BW = (cache.lengths[:, None] - row_W) % window
        written_BW = age_BW <= cache.lengths[:, None]
        cached = layer["key"], layer["value"]
        return windowed_attention_step(
            q_BHK, *cached, row_W.expand_as(age_BW), written_BW, backend=self.mixer.kernel
        )


def _cache(batch: Batch) -> Cache:
    assert batch.cache is not None
    return batch.cache
