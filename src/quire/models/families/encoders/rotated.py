"""Encoders with rotated heads: Nomic Embed, GTE of 2024, and Jina Embeddings v3 without its adapters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig, rope_config
from quire.models.decoder.shapes import AttentionShape, MLPShape, PositionsShape
from quire.models.encoder.model import QKV_STACK, Encoder
from quire.models.encoder.shapes import EncoderShape
from quire.models.families.encoders.bert import BERT_NAMES
from quire.models.layers.activation import activation_kind
from quire.models.layers.rotary import RopeShape
from quire.models.weights.stacked import Stack

_GATE_STACK = Stack(r"\.up_gate_proj\.weight$", (".up_proj.weight", ".gate_proj.weight"), num_experts=1)
_OF_GATED = {"swiglu": "silu", "geglu": "gelu"}
"""Nomic's names of gated MLPs -> those of their activations."""


class RotatedEncoder(Encoder):
    """BERT with rotated heads in the place of a table of positions."""

    default_base: ClassVar[float]
    """Of the rotation, in a config without it."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """What all configs of the family's own form say, if they have the key."""
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^(nomic_bert|new|gte|roberta|jina_embeddings_v3)\.", ""),
        (r"^emb_ln\.", "embed_norm."),
        (r"^encoder\.layers?\.", "layers."),
        (r"\.(?:attn|attention|mixer)\.(q|k|v|o|out)_proj\.", r".self_attn.\1_proj."),
        (r"\.out_proj\.", ".o_proj."),
        (r"\.(norm1|attn_ln|post_attention_layernorm)\.", ".input_layernorm."),
        (r"\.(norm2|mlp_ln|post_mlp_layernorm)\.", ".post_attention_layernorm."),
        *BERT_NAMES,
    )

    @classmethod
    def shape(cls, config: ModelConfig) -> EncoderShape:
        for key, usual in cls.usual.items():
            if (stated := config.hf_config.get(key)) not in (None, usual):
                raise UnsupportedModelError(f"{config.hf_config.source}: {key!r} is {stated!r:.80}: not supported")
        return super().shape(config)

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        return (QKV_STACK, _GATE_STACK)

    @classmethod
    def positions_shape(cls, hf: HFConfig) -> PositionsShape | None:
        return None

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        base = hf.number("rope_theta", cls.default_base)
        return RopeShape.read(rope_config(HFConfig({**hf, "rope_theta": base}, hf.source)), head_dim)


class NomicBert(RotatedEncoder):
    """Nothing has a bias but norms, and MLPs are gated."""

    default_base = 1000.0
    usual = dict.fromkeys(("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "causal"), False)
    renames = (
        (r"\.fc11\.", ".up_proj."),
        (r"\.fc12\.", ".gate_proj."),
        (r"\.fc2\.", ".down_proj."),
        *RotatedEncoder.renames,
    )

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(super().attention_shape(hf, layer), qkv_bias=False, o_bias=False)

    @classmethod
    def mlp_shape(cls, hf: HFConfig) -> MLPShape:
        stated = hf.text("hidden_act", "silu")
        named = HFConfig({**hf, "hidden_act": _OF_GATED.get(stated, stated)}, hf.source)
        return MLPShape(hf.size("intermediate_size"), activation_kind(named, "hidden_act", "silu"))


class Gte(RotatedEncoder):
    """MLPs are gated, with a bias at their end alone."""

    default_base = 160_000.0
    usual: ClassVar = {
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    }

    @classmethod
    def mlp_shape(cls, hf: HFConfig) -> MLPShape:
        return replace(super().mlp_shape(hf), is_gated=True, up_bias=False)


class JinaEmbeddingsV3(RotatedEncoder):
    """XLM-RoBERTa with rotated heads."""

    default_base = 20_000.0
    renames = ((r"\.fc1\.", ".up_proj."), (r"\.fc2\.", ".down_proj."), *RotatedEncoder.renames)
