"""FoX as a Megatron layer's mixer."""

from mixtron.megatron_ext.mixers.path.module import Mixer as PathMixer


class Mixer(PathMixer):
    """Causal softmax attention with sum of log f_{j+1 .. i} in its logits, f = sigmoid(w_f x + b_f)
    one a query head; no position encoding besides. PaTH-FoX without its Householder maps, and
    PaTH's code: TP, SP, CP and initialisation are described there.
    """
