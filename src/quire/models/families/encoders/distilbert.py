"""DistilBERT (Sanh et al. 2019): BERT of half as many layers, without a table for the texts of a pair."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.encoder.model import Encoder
from quire.models.encoder.shapes import EmbeddingsShape
from quire.models.families.encoders.bert import BERT_NAMES
from quire.models.pooling.heads import HeadShape


class DistilBert(Encoder):
    """Its own names."""

    renames = (
        (r"^distilbert\.", ""),
        *BERT_NAMES,
        (r"^transformer\.layer\.", "layers."),
        (r"\.attention\.(q|k|v)_lin\.", r".self_attn.\1_proj."),
        (r"\.attention\.out_lin\.", ".self_attn.o_proj."),
        (r"\.sa_layer_norm\.", ".input_layernorm."),
        (r"\.ffn\.lin1\.", ".mlp.up_proj."),
        (r"\.ffn\.lin2\.", ".mlp.down_proj."),
        (r"\.output_layer_norm\.", ".post_attention_layernorm."),
    )
    ignored = (*Encoder.ignored, r"^vocab_(transform|layer_norm|projector)\.")

    @classmethod
    def embeddings_shape(cls, hf: HFConfig) -> EmbeddingsShape:
        return replace(super().embeddings_shape(hf), num_types=0)

    @classmethod
    def sequence_head(cls, hf: HFConfig) -> HeadShape:
        return HeadShape(has_dense=True, activation="relu")
