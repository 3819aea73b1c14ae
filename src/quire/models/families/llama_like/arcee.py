"""AFM (Arcee 2025): Llama with a plain MLP of squared rectifiers."""

from quire.models.families.llama import LlamaForCausalLM


class ArceeForCausalLM(LlamaForCausalLM):
    """All sizes."""

    default_activation = "relu2"
    has_gated_mlp = False
