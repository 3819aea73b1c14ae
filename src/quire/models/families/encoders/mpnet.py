"""MPNet (Song et al. 2020), among them all-mpnet-base-v2: BERT whose scores have weights for distances too."""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.encoder.model import Encoder
from quire.models.encoder.shapes import EncoderShape
from quire.models.families.encoders.bert import BERT_NAMES

_NUM_BUCKETS = 32


class MPNet(Encoder):
    """Its own names."""

    renames = (
        (r"^mpnet\.", ""),
        (r"\.attention\.attn\.(q|k|v|o)\.", r".self_attn.\1_proj."),
        (r"\.attention\.LayerNorm\.", ".input_layernorm."),
        (r"^encoder\.relative_attention_bias\.", "relative_bias."),
        *BERT_NAMES,
    )
    has_types = False
    has_padding_position = True

    @classmethod
    def shape(cls, config: ModelConfig) -> EncoderShape:
        buckets = config.hf_config.size("relative_attention_num_buckets", _NUM_BUCKETS)
        return replace(super().shape(config), num_buckets=buckets)
