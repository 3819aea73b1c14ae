"""ERNIE 4.5 (Baidu 2025) without experts: Llama with heads that are rotated in pairs."""

from quire.models.decoder.model import Decoder
from quire.models.layers.norm import NormShape


class Ernie45ForCausalLM(Decoder):
    """`use_bias` is one flag for all projections."""

    ties_by_default = True
    default_head_dim = 128
    has_interleaved_rope = True
    default_norm = NormShape(1e-5)
    qkv_bias = o_bias = mlp_bias = ("use_bias", False)
