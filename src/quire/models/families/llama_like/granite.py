"""Granite 3 (IBM 2024) and HyperCLOVA X (NAVER 2025): Llama with multipliers of embeddings, residuals, logits."""

from dataclasses import replace
from typing import ClassVar

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.shapes import Arrangement, AttentionShape, DecoderShape, LayerShape, MLPShape
from quire.models.families.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """Logits are divided by `logits_scaling`."""

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        hf = config.hf_config
        multipliers = hf.number("embedding_multiplier", 1.0), 1 / hf.number("logits_scaling", 1.0)
        return replace(super().shape(config), embed_multiplier=multipliers[0], logit_multiplier=multipliers[1])

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        scale, multiplier = hf.number("attention_multiplier", 1.0), hf.number("residual_multiplier", 1.0)
        return replace(super().attention_shape(hf, layer), scale=scale, output_multiplier=multiplier)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return replace(super().mlp_shape(hf, layer), output_multiplier=hf.number("residual_multiplier", 1.0))


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    """Norms on both sides of attention and MLP, and logits that are multiplied by `logits_scaling`."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_norm1\.", ".post_attention_layernorm."),
        (r"\.post_norm2\.", ".post_feedforward_layernorm."),
    )

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        return replace(super().shape(config), logit_multiplier=config.hf_config.number("logits_scaling", 1.0))

    @classmethod
    def layer_shape(cls, hf: HFConfig, layer: int) -> LayerShape:
        if not hf.flag("use_post_norm", True):
            raise UnsupportedModelError(f"{hf.source}: 'use_post_norm' is false: only models with these norms are")
        norm = replace(cls.norm_shape(hf), multiplier=hf.number("residual_multiplier", 1.0))
        return replace(super().layer_shape(hf, layer), arrangement=Arrangement.SANDWICH, output_norm=norm)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        attention = super().attention_shape(hf, layer)
        scale = hf.number("attention_multiplier", attention.head_dim**-0.5)
        return replace(attention, scale=scale, output_multiplier=1.0)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return replace(super().mlp_shape(hf, layer), output_multiplier=1.0)
