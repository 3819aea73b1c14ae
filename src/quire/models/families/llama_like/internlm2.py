"""InternLM2 and 2.5 (Cai et al. 2024): Llama with other names, whose queries, keys and values lie by groups."""

from typing import ClassVar

from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import QKVLayout


class InternLM2ForCausalLM(Decoder):
    """All sizes."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"^tok_embeddings\.", "embed_tokens."),
        (r"^output\.", "lm_head."),
        (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attention\.wo\.", ".self_attn.o_proj."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    )
    fused: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj")}
    qkv_bias = o_bias = ("bias", False)
    qkv_layout = QKVLayout.BY_GROUP
