"""Nemotron 4, Minitron (NVIDIA 2024) and Jais 2 (Inception 2025): Llama with layer norms and a plain MLP."""

from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.norm import NormShape


class NemotronForCausalLM(LlamaForCausalLM):
    """Squared rectifiers, a partial rotary embedding, and weights of norms that are stored less 1."""

    default_norm = NormShape(1e-5, is_rms=False, has_bias=True, offset=1.0)
    default_activation = "relu2"
    has_gated_mlp = False


class Jais2ForCausalLM(NemotronForCausalLM):
    """Biases unless the config says otherwise, and weights of norms as they are."""

    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    qkv_bias = o_bias = ("attention_bias", True)
    mlp_bias = ("mlp_bias", True)
