"""MPNet (Song et al. 2020), among them all-mpnet-base-v2: BERT whose scores have weights for distances too."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.shapes import PositionsShape
from quire.models.encoder.model import Encoder
from quire.models.encoder.shapes import EmbeddingsShape, EncoderShape
from quire.models.families.encoders.bert import BERT_NAMES
from quire.models.families.encoders.roberta import positions_after_padding

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

    @classmethod
    def shape(cls, config: ModelConfig) -> EncoderShape:
        buckets = config.hf_config.size("relative_attention_num_buckets", _NUM_BUCKETS)
        return replace(super().shape(config), num_buckets=buckets)

    @classmethod
    def embeddings_shape(cls, hf: HFConfig) -> EmbeddingsShape:
        return replace(super().embeddings_shape(hf), num_types=0)

    @classmethod
    def positions_shape(cls, hf: HFConfig) -> PositionsShape:
        return positions_after_padding(hf)
