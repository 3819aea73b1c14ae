"""MPT (MosaicML 2023): ALiBi, layer norms without biases, and no biases elsewhere."""

from dataclasses import replace
from typing import ClassVar

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import alibi_slopes, read_clip, read_section
from quire.models.decoder.shapes import AttentionShape, MLPShape, QKVLayout
from quire.models.layers.norm import NormShape

_MAX_BIAS = 8.0
_MLP_RATIO = 4


class MptForCausalLM(Decoder):
    """7B and 30B. Of `attn_config`, what is not computed is refused by name."""

    renames: ClassVar = (
        (r"^transformer\.", ""),
        (r"^wte\.", "embed_tokens."),
        (r"^norm_f\.", "norm."),
        (r"^blocks\.", "layers."),
        (r"\.norm_1\.", ".input_layernorm."),
        (r"\.norm_2\.", ".post_attention_layernorm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.ffn\.", ".mlp."),
    )
    fused: ClassVar = {}
    ties_by_default = True
    default_norm = NormShape(1e-5, is_rms=False)
    has_rope = False
    qkv_layout = QKVLayout.STACKED

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        attention = super().attention_shape(hf, layer)
        options = read_section(hf, "attn_config")
        for key in ("qk_ln", "prefix_lm", "attn_uses_sequence_id", "rope"):
            if options.get(key):
                raise UnsupportedModelError(f"{options.source}: {key!r} is {options[key]!r}, which is not supported")
        if hf.get("logit_scale") is not None:
            raise UnsupportedModelError(f"{hf.source}: 'logit_scale' is {hf['logit_scale']!r}, which is not supported")
        if not options.flag("alibi", True):
            raise UnsupportedModelError(f"{options.source}: 'alibi' is false, which is not supported")
        return replace(
            attention,
            scale=options.number("softmax_scale", attention.scale),
            slopes=alibi_slopes(attention.num_heads, options.number("alibi_bias_max", _MAX_BIAS)),
            clip=read_clip(options),
        )

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        width = hf.size("expansion_ratio", _MLP_RATIO) * hf.size("hidden_size")
        return MLPShape(width, "gelu", is_gated=False)
