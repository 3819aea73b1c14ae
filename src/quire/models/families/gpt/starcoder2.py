"""StarCoder2 (Lozhkov et al. 2024): layer norms, a plain MLP, biases, and a sliding window or none."""

from typing import ClassVar

from quire.models.decoder.model import Decoder
from quire.models.layers.norm import NormShape


class Starcoder2ForCausalLM(Decoder):
    """All sizes."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    )
    ties_by_default = True
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    default_activation = "gelu_pytorch_tanh"
    has_gated_mlp = False
    qkv_bias = o_bias = mlp_bias = ("use_bias", True)
    has_window = True
