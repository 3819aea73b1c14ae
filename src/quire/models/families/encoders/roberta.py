"""RoBERTa (Liu et al. 2019), XLM-RoBERTa and CamemBERT, among them BGE-M3 and multilingual E5."""

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import PositionsShape
from quire.models.encoder.model import Encoder
from quire.models.families.encoders.bert import BERT_NAMES


def positions_after_padding(hf: HFConfig) -> PositionsShape:
    """Position 0 has the row after that of the padding token."""
    first = hf.count("pad_token_id", 1) + 1
    return PositionsShape(hf.size("max_position_embeddings") + first, first)


class Roberta(Encoder):
    """Positions are counted from behind the padding token's id."""

    renames = ((r"^(roberta|camembert)\.", ""), *BERT_NAMES)

    @classmethod
    def positions_shape(cls, hf: HFConfig) -> PositionsShape:
        return positions_after_padding(hf)
