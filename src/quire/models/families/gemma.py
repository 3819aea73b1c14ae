"""Gemma (Gemma Team 2024), Gemma 2, VaultGemma (Sinha et al. 2025) and the text models of Gemma 3."""

from dataclasses import replace
from typing import ClassVar

import torch

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig, rope_config
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import FULL, SLIDING, layer_type, read_cap
from quire.models.decoder.shapes import Arrangement, AttentionShape, DecoderShape
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape

_WINDOW = 4096
_QUERY_SCALAR = 256.0
_LOCAL_BASE, _GLOBAL_BASE = 10_000.0, 1_000_000.0


class GemmaForCausalLM(Decoder):
    """Norm weights are stored less 1; embeddings are multiplied by the root of their width, rounded to the dtype."""

    ties_by_default = True
    default_head_dim = 256
    default_norm = NormShape(1e-6, offset=1.0)
    default_activation = "gelu_pytorch_tanh"
    qkv_bias = o_bias = ("attention_bias", False)

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        shape = super().shape(config)
        multiplier = torch.tensor(shape.hidden_size**0.5).to(shape.dtype).item()
        return replace(shape, embed_multiplier=multiplier)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        shape = super().attention_shape(hf, layer)
        return replace(shape, is_causal=shape.is_causal and not hf.flag("use_bidirectional_attention", False))


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Norms on both sides of attention and MLP, capped scores and logits, and a window in every other layer."""

    default_period: ClassVar[int] = 2
    """In a config without `layer_types` and `sliding_window_pattern`, each layer of this number sees all."""
    default_caps: ClassVar[tuple[float, float] | tuple[None, None]] = (50.0, 30.0)
    """Of scores and of logits, in a config without the keys."""

    arrangement = Arrangement.SANDWICH

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        cap = read_cap(config.hf_config, "final_logit_softcapping", cls.default_caps[1])
        return replace(super().shape(config), logit_softcap=cap)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(
            super().attention_shape(hf, layer),
            scale=hf.number("query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5,
            softcap=read_cap(hf, "attn_logit_softcapping", cls.default_caps[0]),
        )

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        return hf.size("sliding_window", _WINDOW) if cls.layer_type(hf, layer) == SLIDING else None

    @classmethod
    def layer_type(cls, hf: HFConfig, layer: int) -> str:
        """FULL or SLIDING."""
        period = hf.size("sliding_window_pattern", cls.default_period)
        return layer_type(hf, layer, lambda i: SLIDING if (i + 1) % period else FULL)


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with norms before attention and MLP alone."""

    renames: ClassVar = (*Gemma2ForCausalLM.renames, (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."))
    arrangement = Arrangement.PRE_NORM


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 without caps, with norms of heads, and two rotary embeddings: one of layers with a window, one of others.

    `layer_types`, or else `sliding_window_pattern`, says which they are: by default every sixth layer sees all. Where
    tokens see each other in both directions (EmbeddingGemma), half of a window lies on either side.
    """

    default_period = 6
    default_caps = (None, None)
    has_head_norm = True

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        window = super().window(hf, layer)
        return window // 2 if window and hf.flag("use_bidirectional_attention", False) else window

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        kind = cls.layer_type(hf, layer)
        bases = {SLIDING: hf.number("rope_local_base_freq", _LOCAL_BASE), FULL: hf.number("rope_theta", _GLOBAL_BASE)}
        if hf.get("rope_parameters") is None and kind == SLIDING:
            hf = HFConfig({**hf, "rope_scaling": None}, hf.source)  # it is that of the others
        return RopeShape.read(rope_config(HFConfig({**hf, "rope_theta": bases[kind]}, hf.source), kind), head_dim)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 for text and images, of which the text model is loaded."""

    renames: ClassVar = ((r"^(model\.)?language_model\.", ""), (r"^model\.", ""))
    ignored: ClassVar = (*Gemma3ForCausalLM.ignored, r"^(model\.)?(vision_tower|multi_modal_projector)\.")
