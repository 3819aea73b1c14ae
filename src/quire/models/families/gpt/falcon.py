"""Falcon (Almazrouei et al. 2023): attention and a plain MLP side by side, in one form for 7B and another for 40B."""

from dataclasses import replace
from typing import ClassVar

import torch

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import alibi_slopes
from quire.models.decoder.shapes import Arrangement, AttentionShape, QKVLayout
from quire.models.families.gpt.bloom import BloomForCausalLM
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape


class FalconForCausalLM(Decoder):
    """`new_decoder_architecture` (40B, 180B, Falcon 2) has grouped queries and two norms in a layer; the form before it
    has one key and value for all queries (7B), or one for each of them (RW, with ALiBi)."""

    renames: ClassVar = (
        *BloomForCausalLM.renames,
        (r"\.ln_attn\.", ".input_layernorm."),
        (r"\.ln_mlp\.", ".post_attention_layernorm."),
    )
    fused: ClassVar = {}
    ties_by_default = True
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    default_activation = "gelu"
    default_mlp_ratio = 4
    has_gated_mlp = False
    qkv_bias = o_bias = mlp_bias = ("bias", False)
    qkv_layout = QKVLayout.BY_GROUP

    @classmethod
    def arrangement_of(cls, hf: HFConfig) -> Arrangement:
        if not hf.flag("parallel_attn", True):
            return Arrangement.PRE_NORM
        num_norms = hf.size("num_ln_in_parallel_attn", 2)
        is_two = hf.flag("new_decoder_architecture", False) and num_norms == 2
        return Arrangement.PARALLEL_TWO_NORMS if is_two else Arrangement.PARALLEL

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        attention = super().attention_shape(hf, layer)
        num_kv_heads = attention.num_kv_heads
        if not hf.flag("new_decoder_architecture", False):
            num_kv_heads = 1 if hf.flag("multi_query", True) else attention.num_heads
        slopes = _slopes(attention.num_heads, attention.scale) if hf.flag("alibi", False) else None
        return replace(attention, num_kv_heads=num_kv_heads, slopes=slopes)

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        return None if hf.flag("alibi", False) else super().rope_shape(hf, layer, head_dim)


def _slopes(num_heads: int, scale: float) -> tuple[float, ...]:
    """Those of ALiBi, rounded to bfloat16, and multiplied by the scale: Falcon adds them to scores before that."""
    rounded = torch.tensor(alibi_slopes(num_heads)).to(torch.bfloat16).tolist()
    return tuple(slope * scale for slope in rounded)
