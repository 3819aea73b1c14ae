"""StarCoder2 (Lozhkov et al. 2024): layer norms, a plain MLP, biases, and a sliding window or none."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import AttentionShape, MLPShape
from quire.models.layers.activation import activation_kind
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

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        bias = hf.flag("use_bias", True)
        window = hf.size("sliding_window") if hf.get("sliding_window") is not None else None
        return replace(super().attention_shape(hf, layer), qkv_bias=bias, o_bias=bias, sliding_window=window)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        activation, bias = activation_kind(hf, "hidden_act", "gelu_pytorch_tanh"), hf.flag("use_bias", True)
        return MLPShape(hf.size("intermediate_size"), activation, is_gated=False, up_bias=bias, down_bias=bias)
