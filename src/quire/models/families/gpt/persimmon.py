"""Persimmon (Adept 2023): GPT-NeoX, one part after the other, with layer norms of heads and squared rectifiers."""

from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import rope_config
from quire.models.decoder.shapes import Arrangement
from quire.models.families.gpt.gpt_neox import GPTNeoXForCausalLM
from quire.models.layers.rotary import RopeShape


class PersimmonForCausalLM(GPTNeoXForCausalLM):
    """Half of each head is rotated."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"^final_layernorm\.", "norm."),
        (r"\.self_attn\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
        *GPTNeoXForCausalLM.renames[-2:],
    )
    default_activation = "relu2"
    qkv_bias = o_bias = True
    has_head_norm = ("qk_layernorm", True)

    @classmethod
    def arrangement_of(cls, hf: HFConfig) -> Arrangement:
        return Arrangement.PRE_NORM

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        return RopeShape.read(rope_config(HFConfig({"partial_rotary_factor": 0.5, **hf}, hf.source)), head_dim)
