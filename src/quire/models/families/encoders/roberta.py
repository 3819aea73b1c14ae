"""RoBERTa (Liu et al. 2019), XLM-RoBERTa and CamemBERT, among them BGE-M3 and multilingual E5."""

from quire.models.encoder.model import Encoder
from quire.models.families.encoders.bert import BERT_NAMES


class Roberta(Encoder):
    """Positions are counted from behind the padding token's id."""

    renames = ((r"^(roberta|camembert)\.", ""), *BERT_NAMES)
    has_padding_position = True
