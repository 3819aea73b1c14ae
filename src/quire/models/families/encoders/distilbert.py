"""DistilBERT (Sanh et al. 2019): BERT of half as many layers, without a table for the texts of a pair."""

from quire.models.encoder.model import Encoder
from quire.models.families.encoders.bert import BERT_NAMES


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
    has_types = False
    head_activation = "relu"
