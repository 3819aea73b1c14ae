"""MiniCPM 1 and 2 (Hu et al. 2024): Llama with multipliers of embeddings, residuals and logits, from other keys."""

from dataclasses import replace

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.shapes import AttentionShape, DecoderShape, MLPShape
from quire.models.families.llama import LlamaForCausalLM


class MiniCPMForCausalLM(LlamaForCausalLM):
    """The multiplier of residuals shrinks with the root of the number of layers."""

    ties_by_default = True

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        hf, shape = config.hf_config, super().shape(config)
        for key in ("num_experts", "sparse_config"):
            if hf.get(key):
                raise UnsupportedModelError(f"{hf.source}: {key!r} is {str(hf[key])[:80]}, which is not supported")
        logits = hf.number("dim_model_base", shape.hidden_size) / shape.hidden_size
        return replace(shape, embed_multiplier=hf.number("scale_emb", 1.0), logit_multiplier=logits)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(super().attention_shape(hf, layer), output_multiplier=_residual_multiplier(hf))

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return replace(super().mlp_shape(hf, layer), output_multiplier=_residual_multiplier(hf))


def _residual_multiplier(hf: HFConfig) -> float:
    return float(hf.number("scale_depth", 1.0) / hf.size("num_hidden_layers") ** 0.5)
