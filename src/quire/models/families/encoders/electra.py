"""ELECTRA (Clark et al. 2020): BERT whose tables may be narrower than its layers."""

from quire.models.encoder.model import Encoder
from quire.models.families.encoders.bert import BERT_NAMES


class Electra(Encoder):
    """Its discriminator."""

    renames = ((r"^electra\.", ""), *BERT_NAMES)
    ignored = (*Encoder.ignored, r"^(discriminator_predictions|generator_predictions|generator_lm_head)\.")
    head_activation = "gelu"
