"""NanoChat (Karpathy 2025): norms without weights, a plain MLP, and heads rotated backwards before they are normed."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig, rope_config
from quire.models.decoder.reading import read_cap
from quire.models.decoder.shapes import DecoderShape
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape


class NanoChatForCausalLM(LlamaForCausalLM):
    """A norm of the embeddings, and capped logits."""

    renames: ClassVar = (*LlamaForCausalLM.renames, (r"\.fc1\.", ".up_proj."), (r"\.fc2\.", ".down_proj."))
    default_norm = NormShape(1e-6, has_weight=False)
    default_activation = "relu2"
    has_gated_mlp = False
    mlp_bias = False
    has_head_norm = True
    norms_rotated_heads = True
    has_embed_norm = True

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        cap = read_cap(config.hf_config, "final_logit_softcapping", 15.0)
        return replace(super().shape(config), logit_softcap=cap)

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        return replace(RopeShape.read(rope_config(hf), head_dim), is_backward=True)
