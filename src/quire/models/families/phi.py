"""Phi-1.5 and 2 (Li et al. 2023), and Phi-3 and 4 (Abdin et al. 2024), which share little but the name."""

from typing import ClassVar

from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import Arrangement, QKVLayout
from quire.models.layers.norm import NormShape


class PhiForCausalLM(Decoder):
    """Attention and a plain MLP side by side, biases everywhere, and a partial rotary embedding."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"^final_layernorm\.", "norm."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.([qk])_layernorm\.", r".\1_norm."),
        (r"\.mlp\.fc1\.", ".mlp.up_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    )
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    arrangement = Arrangement.PARALLEL
    has_head_norm = ("qk_layernorm", False)
    has_gated_mlp = False
    qkv_bias = o_bias = mlp_bias = head_bias = True


class Phi3ForCausalLM(Decoder):
    """Llama with queries, keys and values in one tensor, gate and up in another, and a sliding window or none."""

    fused: ClassVar = {}
    qkv_layout = QKVLayout.STACKED
    has_stacked_mlp = True
    has_window = True
