"""HunYuan dense (Tencent 2025): Llama with norms of heads after they are rotated."""

from typing import ClassVar

from quire.models.families.llama import LlamaForCausalLM


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """All sizes of version 1."""

    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.", ""),
        (r"\.query_layernorm\.", ".q_norm."),
        (r"\.key_layernorm\.", ".k_norm."),
    )
    has_head_norm = True
    norms_rotated_heads = True
