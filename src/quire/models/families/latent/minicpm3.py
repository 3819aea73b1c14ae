"""MiniCPM3 (OpenBMB 2024): latent attention with an MLP in every layer, and multipliers of what layers add"""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.shapes import DecoderShape, LayerShape, MLPShape
from quire.models.families.latent.deepseek import LatentDecoder


class MiniCPM3ForCausalLM(LatentDecoder):
    """Heads are rotated in halves."""

    ties_by_default: ClassVar[bool] = True
    has_interleaved_rope: ClassVar[bool] = False

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        hf, shape = config.hf_config, super().shape(config)
        multiplier = hf.number("dim_model_base", 256) / shape.hidden_size
        return replace(shape, embed_multiplier=hf.number("scale_emb", 12), logit_multiplier=multiplier)

    @classmethod
    def layer_shape(cls, hf: HFConfig, layer: int) -> LayerShape:
        shape, multiplier = super().layer_shape(hf, layer), hf.number("scale_depth", 1.4)
        multiplier *= hf.size("num_hidden_layers") ** -0.5
        assert isinstance(shape.mlp, MLPShape)
        attention = replace(shape.attention, output_multiplier=multiplier)
        return replace(shape, attention=attention, mlp=replace(shape.mlp, output_multiplier=multiplier))
