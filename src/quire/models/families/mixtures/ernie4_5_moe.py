"""ERNIE 4.5 (Baidu 2025) with experts, of which some are shared by all tokens."""

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.models.decoder.reading import read_routing
from quire.models.families.llama_like.ernie4_5 import Ernie45ForCausalLM
from quire.models.layers.activation import activation_kind
from quire.models.layers.experts import ExpertsShape


class Ernie45MoeForCausalLM(Ernie45ForCausalLM):
    """A softmax over all experts, and a correction of which are chosen."""

    renames = (*Ernie45ForCausalLM.renames, (r"\.mlp\.(gate\.)?moe_statics\.", ".mlp.gate."))

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        first, last = _integer(hf, "moe_layer_start_index", 1), _integer(hf, "moe_layer_end_index", -1)
        last = hf.size("num_hidden_layers") - 1 if last == -1 else last
        if not first <= layer <= last or (layer + 1) % hf.size("moe_layer_interval", 1):
            return None
        if hf.flag("use_bias", False):
            raise UnsupportedModelError(f"{hf.source}: use_bias is not supported with experts")
        num_experts, num_shared = hf.size("moe_num_experts", 64), _integer(hf, "moe_num_shared_experts", 2)
        width = hf.size("moe_intermediate_size", 1536)
        return ExpertsShape(
            read_routing(hf, num_experts, hf.size("moe_k", 6), is_normalized=True),
            width,
            activation_kind(hf, "hidden_act", "silu"),
            correction_shape=(1, num_experts),
            shared_width=width * num_shared if num_shared > 0 else None,
        )


def _integer(hf: HFConfig, key: str, default: int) -> int:
    """An integer, which may be 0 or -1."""
    value = hf.get(key)
    return value if isinstance(value, int) else default
