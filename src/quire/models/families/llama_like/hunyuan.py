"""HunYuan dense (Tencent 2025): Llama with norms of heads after they are rotated."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import AttentionShape, HeadNormShape
from quire.models.families.llama import LlamaForCausalLM


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """All sizes of version 1."""

    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.", ""),
        (r"\.query_layernorm\.", ".q_norm."),
        (r"\.key_layernorm\.", ".k_norm."),
    )

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        norm = HeadNormShape(cls.norm_shape(hf), after_rope=True)
        return replace(super().attention_shape(hf, layer), head_norm=norm)
