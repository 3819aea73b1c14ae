"""ELECTRA (Clark et al. 2020): BERT whose tables may be narrower than its layers."""

from quire.config.hf_config import HFConfig
from quire.models.encoder.model import Encoder
from quire.models.families.encoders.bert import BERT_NAMES
from quire.models.pooling.heads import HeadShape


class Electra(Encoder):
    """Its discriminator."""

    renames = ((r"^electra\.", ""), *BERT_NAMES)
    ignored = (*Encoder.ignored, r"^(discriminator_predictions|generator_predictions|generator_lm_head)\.")

    @classmethod
    def sequence_head(cls, hf: HFConfig) -> HeadShape:
        return HeadShape(has_dense=True, activation="gelu")
