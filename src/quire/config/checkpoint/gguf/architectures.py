"""How GGUF files of one architecture differ from its Hugging Face checkpoints: names, keys, and what converters change.

Names of tensors and keys: the tables of the `gguf` package. What is changed: llama.cpp's conversion scripts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

DECODER: Mapping[str, str | tuple[str, ...]] = {
    "token_embd": "embed_tokens",
    "token_embd_norm": "embed_norm",
    "position_embd": "embed_positions",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "xielu.alpha_n": "mlp.act_fn.alpha_n",
    "xielu.alpha_p": "mlp.act_fn.alpha_p",
}
"""Module in the file, or one of its tensors -> module or tensor in a Hugging Face checkpoint of Llama and its relatives
or, if these have none like it, in Quire's model. Several: their rows follow each other, those of queries, keys and
values."""
FUSED = {"attn_qkv": "self_attn.qkv_proj"}
"""Of classes that have queries, keys and values in one tensor."""
STACKED_MLP = {"ffn_up": "mlp.gate_up_proj"}
"""Of classes that have gate and up in one tensor."""
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are parameters of the rotary embedding, not weights."""
SOFTMAX, SIGMOID = 1, 2
"""of `expert_gating_func`"""

_TENSOR = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
_OUTSIDE = ("lm_head",)
"""Modules that are not below `root`."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture`. All is data, and nothing depends on a file."""

    name: str
    """The class's name, as in a config.json."""
    mixture: str | None = None
    """The class's name where the header has a number of experts. None: such files are not supported."""
    windowed: str | None = None
    """The class's name where the header has a sliding window shorter than the context. None: the same."""
    root: str = "model."
    """What names in the checkpoint begin with."""
    modules: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """What differs from DECODER."""
    if_present: "tuple[str, Architecture] | None" = None
    """A tensor, and the row that counts where a file has it."""

    pairs: tuple[str, ...] = ()
    """Modules of queries or keys whose rows converters reorder for a rotation of neighbours."""
    is_grouped: bool = False
    """Whether the class has rows of queries, keys and values by group of heads, where files have all queries first."""
    norm_offset: float = 0.0
    """What converters add to the weights of norms."""
    unsqueezed: tuple[str, ...] = ("ffn_gate_inp_shexp.weight",)
    """Tensors whose first dimension, of size 1, converters leave out."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json (of a section: with a dot) -> the header's key after the architecture's name. Where a header
    lacks it, the config does."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """What the header does not say, or values of keys that it may lack."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key of config.json -> tensors; it is true if one of them is there."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the header that must have this value, if it has them."""
    gating: int = SOFTMAX
    """How experts are scored."""
    period: int | None = None
    """Of layers with a sliding window: every such layer sees all, unless the header says which. None: no layer does."""
    default_window: int | None = None
    """Where the header names none."""
    rotates_windows_apart: bool = False
    """Whether layers with a window have a rotary embedding of their own, which is not stretched."""
    window_rope_base: float | None = None
    """Its base, unless the header has it. None: that of the other layers."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """What the header does not say of a stretched rotary embedding."""
    wide_scale_layers: int | None = None
    """A model with this many layers has scores scaled by the root of hidden_size / heads, and not of head_dim."""

    def weight_names(self, name: str) -> tuple[str, ...]:
        """The names of a tensor, or of its ranges of rows, in a checkpoint of the class: its own if it is unknown."""
        match = _TENSOR.fullmatch(name)
        if match is None:
            return (name,)
        own = f"{match['module']}.{match['kind']}"
        for key, suffix in ((own, ""), (match["module"], f".{match['kind']}")):
            found = self.modules.get(key) or DECODER.get(key)
            if found is not None:
                return tuple(self._rooted(f"{module}{suffix}", match["layer"]) for module in _each(found))
        return (name,)

    def value_name(self, key: str, layer: int) -> str:
        """The name, in a checkpoint of the class, of a tensor that is a value of the header."""
        return self._rooted(str(DECODER[key]), str(layer))

    def _rooted(self, name: str, layer: str | None) -> str:
        if layer is not None:
            return f"{self.root}layers.{int(layer)}.{name}"
        return name if name.partition(".")[0] in _OUTSIDE else f"{self.root}{name}"


def module_of(name: str) -> str | None:
    """The name of a tensor's module in the file, without its layer."""
    match = _TENSOR.fullmatch(name)
    return None if match is None else match["module"]


def layer_of(name: str) -> int | None:
    """The layer of a tensor; None if it is of none."""
    match = _TENSOR.fullmatch(name)
    return None if match is None or match["layer"] is None else int(match["layer"])


def like(base: Architecture, name: str, **changes: Any) -> Architecture:
    """Another class with the same files, but for `changes`."""
    return replace(base, name=name, **changes)


def _each(found: str | tuple[str, ...]) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else found
