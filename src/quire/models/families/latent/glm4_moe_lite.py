"""GLM-4.7 Flash (Z.ai 2026): latent attention and experts as in DeepSeek-V3, a wide MLP where the config says so"""

from quire.common.errors import CheckpointError
from quire.config.hf_config import HFConfig
from quire.models.families.latent.deepseek import DeepseekV3ForCausalLM
from quire.models.layers.experts import ExpertsShape


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """`mlp_layer_types` names the layers with experts: all but the first unless it is given."""

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_layers = hf.size("num_hidden_layers")
        kinds = hf.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
        if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
            raise CheckpointError(f"{hf.source}: 'mlp_layer_types' must be 'dense' or 'sparse' for each layer")
        return cls.routed_experts(hf) if kinds[layer] == "sparse" else None
