"""What GGUF files call the architectures that Quire runs, their parts and their tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import HFConfig

ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are parameters of the rotary embedding, not weights."""

_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""The modules of Llama and its relatives."""
_TENSOR = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture`."""

    name: str
    """The class's name, as in a config.json."""
    mixture: str | None = None
    """The class's name where the header has a number of experts. None: such files are not supported."""
    modules: Mapping[str, str] = field(default_factory=lambda: _DECODER)
    """Module in the file -> module in a Hugging Face checkpoint, below `model.layers.N` if it is a layer's."""
    permuted: Mapping[str, str] = field(default_factory=dict)
    """Modules whose rows are reordered -> the key (after the architecture's name) of their number of heads."""

    def weight_name(self, name: str) -> str | None:
        """The name of a tensor in a Hugging Face checkpoint: its own if it is unknown, None if it is no weight."""
        if name in ROPE_TABLES:
            return None
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"] not in self.modules:
            return name
        layer = "" if match["layer"] is None else f"model.layers.{int(match['layer'])}."
        return f"{layer}{self.modules[match['module']]}.{match['kind']}"

    def permuted_heads(self, name: str, metadata: HFConfig) -> int | None:
        """The number of heads of a tensor whose rows are reordered; None for others."""
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"] not in self.permuted:
            return None
        prefix = metadata.text("general.architecture")
        heads = metadata.size(f"{prefix}.attention.head_count")
        key = f"{prefix}.{self.permuted[match['module']]}"
        return metadata.size(key, heads)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        permuted={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"},
    ),
    "olmoe": Architecture("OlmoeForCausalLM", "OlmoeForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "Qwen3MoeForCausalLM"),
}
"""By `general.architecture`. Mistral's and Mixtral's models are `llama`."""


def architecture_of(metadata: HFConfig) -> Architecture:
    """The row of ARCHITECTURES that a header names. Raises UnsupportedModelError if there is none, and CheckpointError
    if the header names none."""
    if "general.architecture" not in metadata:
        raise CheckpointError(f"{metadata.source} has no 'general.architecture': it does not hold a model")
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{metadata.source}: GGUF files of the architecture {name[:80]!r} are not supported (supported: "
            f"{', '.join(sorted(ARCHITECTURES))})"
        )
    return ARCHITECTURES[name]
