"""BLOOM (BigScience 2022): ALiBi, a norm of the embeddings, and layer norms."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import alibi_slopes
from quire.models.decoder.shapes import Arrangement, AttentionShape, MLPShape, QKVLayout
from quire.models.layers.norm import NormShape


class BloomForCausalLM(Decoder):
    """All sizes. The config has no limit of length: 2048, the length trained on, unless it is given."""

    renames: ClassVar = (
        (r"^transformer\.", ""),
        (r"^word_embeddings\.", "embed_tokens."),
        (r"^word_embeddings_layernorm\.", "embed_norm."),
        (r"^ln_f\.", "norm."),
        (r"^h\.", "layers."),
        (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    )
    fused: ClassVar = {}
    ties_by_default = True
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    has_rope = False
    has_embed_norm = True
    qkv_bias = o_bias = True
    qkv_layout = QKVLayout.BY_GROUP

    @classmethod
    def arrangement_of(cls, hf: HFConfig) -> Arrangement:
        is_after = hf.flag("apply_residual_connection_post_layernorm", False)
        return Arrangement.RESIDUAL_AFTER_NORM if is_after else Arrangement.PRE_NORM

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        attention = super().attention_shape(hf, layer)
        return replace(attention, slopes=alibi_slopes(attention.num_heads))

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return MLPShape(4 * hf.size("hidden_size"), "gelu_tanh", is_gated=False, up_bias=True, down_bias=True)
