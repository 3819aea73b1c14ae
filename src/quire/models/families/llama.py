"""Llama 2 and 3.x (Touvron et al. 2023, Grattafiori et al. 2024)."""

from typing import ClassVar

from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import Setting


class LlamaForCausalLM(Decoder):
    """Biases, if there are any, are on all projections of attention, or of the MLP."""

    qkv_bias: ClassVar[Setting] = ("attention_bias", False)
    o_bias: ClassVar[Setting] = ("attention_bias", False)
    mlp_bias: ClassVar[Setting] = ("mlp_bias", False)
