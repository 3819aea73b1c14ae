"""Granite 3 (IBM 2024): Llama with multipliers of embeddings, scores, residuals and logits."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.shapes import AttentionShape, DecoderShape, MLPShape
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
