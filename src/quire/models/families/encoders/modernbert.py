"""ModernBERT (Warner et al. 2024): rotated heads, gated MLPs, norms in front, and windows in most layers."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig, rope_config
from quire.models.decoder.reading import FULL, SLIDING, layer_type
from quire.models.decoder.shapes import Arrangement, AttentionShape, LayerShape, MLPShape, QKVLayout
from quire.models.encoder.model import Encoder
from quire.models.encoder.shapes import EmbeddingsShape, EncoderShape
from quire.models.layers.activation import activation_kind
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape
from quire.models.pooling.heads import HeadShape

_BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
_MODES = {"cls": "first", "mean": "mean"}


class ModernBert(Encoder):
    """The first layer's attention has no norm before it; that of the embeddings serves."""

    fused: ClassVar = {}
    renames = (
        (r"^model\.", ""),
        (r"^embeddings\.tok_embeddings\.", "embed_tokens."),
        (r"^embeddings\.norm\.", "embed_norm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.Wo\.", ".self_attn.o_proj."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
        (r"\.mlp\.Wo\.", ".mlp.down_proj."),
        (r"^final_norm\.", "norm."),
    )
    ignored = (*Encoder.ignored, r"^decoder\.")
    token_head_has_dense = True

    @classmethod
    def shape(cls, config: ModelConfig) -> EncoderShape:
        return replace(super().shape(config), final_norm=cls.norm_shape(config.hf_config))

    @classmethod
    def embeddings_shape(cls, hf: HFConfig) -> EmbeddingsShape:
        return EmbeddingsShape(hf.size("hidden_size"), cls.norm_shape(hf))

    @classmethod
    def layer_shape(cls, hf: HFConfig, layer: int) -> LayerShape:
        arrangement = Arrangement.PRE_NORM if layer else Arrangement.PRE_NORM_OF_MLP
        return replace(super().layer_shape(hf, layer), arrangement=arrangement)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        bias = hf.flag("attention_bias", False)
        is_local = cls.layer_type(hf, layer) == SLIDING
        window = hf.size("local_attention", 128) // 2 if is_local else None
        shape = replace(super().attention_shape(hf, layer), qkv_bias=bias, o_bias=bias, sliding_window=window)
        return replace(shape, qkv_layout=QKVLayout.STACKED)

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        kind = cls.layer_type(hf, layer)
        key, base = _BASES[kind]
        values = HFConfig({**hf, "rope_theta": hf.number(key, base)}, hf.source)
        return RopeShape.read(rope_config(values, kind), head_dim)

    @classmethod
    def layer_type(cls, hf: HFConfig, layer: int) -> str:
        """FULL or SLIDING."""
        period = hf.size("global_attn_every_n_layers", 3)
        return layer_type(hf, layer, lambda i: SLIDING if i % period else FULL)

    @classmethod
    def mlp_shape(cls, hf: HFConfig) -> MLPShape:
        bias, activation = hf.flag("mlp_bias", False), activation_kind(hf, "hidden_act", "gelu")
        return MLPShape(hf.size("intermediate_size"), activation, is_stacked=True, up_bias=bias, down_bias=bias)

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        return NormShape(hf.number("norm_eps", 1e-5), is_rms=False, has_bias=hf.flag("norm_bias", False))

    @classmethod
    def sequence_head(cls, hf: HFConfig) -> HeadShape:
        mode = hf.text("classifier_pooling", "cls")
        activation = activation_kind(hf, "classifier_activation", "gelu")
        norm, bias = cls.norm_shape(hf), hf.flag("classifier_bias", False)
        return HeadShape(True, activation, bias, norm, mode=_MODES.get(mode, mode))

    @classmethod
    def token_head(cls, hf: HFConfig) -> HeadShape:
        return cls.sequence_head(hf)
