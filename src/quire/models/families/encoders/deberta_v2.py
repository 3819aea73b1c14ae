"""DeBERTa v2 and v3 (He et al. 2021, 2023): BERT in which queries and keys say what distances add to their scores."""

from dataclasses import replace

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.shapes import AttentionShape, PositionsShape
from quire.models.encoder.model import Encoder
from quire.models.encoder.shapes import DistancesShape, EmbeddingsShape, EncoderShape
from quire.models.families.encoders.bert import BERT_NAMES
from quire.models.layers.activation import activation_kind
from quire.models.layers.norm import NormShape
from quire.models.pooling.heads import HeadShape
from quire.models.weights.stacked import Stack

_TERMS = {"c2p", "p2c"}


class DebertaV2(Encoder):
    """Keys and queries of distances are made by the projections of tokens."""

    renames = (
        (r"^deberta\.", ""),
        (r"\.attention\.self\.(query|key|value)_proj\.", r".attention.self.\1."),
        (r"^encoder\.rel_embeddings\.", "distances."),
        (r"^encoder\.LayerNorm\.", "distances.norm."),
        *BERT_NAMES,
    )
    ignored = (*Encoder.ignored, r"^(lm_predictions|mask_predictions)\.")
    default_eps = 1e-7

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        hf = config.hf_config
        return () if hf.flag("position_biased_input", True) else (Stack(r"\.position_embeddings\.", ()),)

    @classmethod
    def shape(cls, config: ModelConfig) -> EncoderShape:
        hf = config.hf_config
        if hf.count("conv_kernel_size", 0):
            raise UnsupportedModelError(f"{hf.source}: 'conv_kernel_size' is above 0: convolutions are not supported")
        if hf.size("embedding_size", hf.size("hidden_size")) != hf.size("hidden_size"):
            raise UnsupportedModelError(f"{hf.source}: 'embedding_size' other than hidden_size is not supported")
        return replace(super().shape(config), distances=_distances(hf, cls.norm_shape(hf)))

    @classmethod
    def embeddings_shape(cls, hf: HFConfig) -> EmbeddingsShape:
        return replace(super().embeddings_shape(hf), num_types=hf.count("type_vocab_size", 0))

    @classmethod
    def positions_shape(cls, hf: HFConfig) -> PositionsShape | None:
        return super().positions_shape(hf) if hf.flag("position_biased_input", True) else None

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        shape = super().attention_shape(hf, layer)
        scale = (shape.head_dim * (1 + len(_terms(hf)))) ** -0.5
        return replace(shape, num_kv_heads=shape.num_heads, scale=scale)

    @classmethod
    def sequence_head(cls, hf: HFConfig) -> HeadShape:
        return HeadShape(has_dense=True, activation=activation_kind(hf, "pooler_hidden_act", "gelu"))


def _terms(hf: HFConfig) -> set[str]:
    """`c2p` if keys of distances meet queries, `p2c` if their queries meet keys."""
    stated = hf.get("pos_att_type") or []
    listed = stated.lower().split("|") if isinstance(stated, str) else stated
    terms = {str(name).strip() for name in listed} if isinstance(listed, list) else {""}
    if not terms <= _TERMS:
        raise UnsupportedModelError(f"{hf.source}: 'pos_att_type' is {str(stated)[:80]}, supported are c2p and p2c")
    return terms


def _distances(hf: HFConfig, norm: NormShape) -> DistancesShape | None:
    terms = _terms(hf)
    if not terms or not hf.flag("relative_attention", False):
        return None
    if not hf.flag("share_att_key", False):
        raise UnsupportedModelError(f"{hf.source}: 'share_att_key' is false: projections of distances are unsupported")
    max_distance, num_buckets = _positive(hf, "max_relative_positions"), _positive(hf, "position_buckets")
    max_distance = max_distance or hf.size("max_position_embeddings")
    has_norm = "layer_norm" in hf.text("norm_rel_ebd", "none").lower()
    return DistancesShape(
        num_buckets or max_distance,
        num_buckets,
        max_distance,
        meets_queries="c2p" in terms,
        meets_keys="p2c" in terms,
        norm_eps=norm.eps if has_norm else None,
    )


def _positive(hf: HFConfig, key: str) -> int | None:
    """A size; None where the key is absent or -1."""
    return None if hf.get(key, -1) in (-1, None) else hf.size(key)
