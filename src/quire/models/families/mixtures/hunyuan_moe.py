"""HunYuan-A13B (Tencent 2025): HunYuan with experts in each layer, one of which all tokens share."""

from dataclasses import replace

from quire.common.errors import CheckpointError
from quire.config.hf_config import HFConfig
from quire.models.decoder.reading import read_experts
from quire.models.families.llama_like.hunyuan import HunYuanDenseV1ForCausalLM
from quire.models.layers.experts import ExpertsShape
from quire.models.layers.norm import NormShape


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    """Numbers of experts may be lists, with one for each layer."""

    renames = (
        *HunYuanDenseV1ForCausalLM.renames,
        (r"\.gate\.wg\.", ".gate."),
        (r"\.shared_mlp\.", ".shared_experts."),
    )
    default_norm = NormShape(1e-5)

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = _of_layer(hf, "num_experts", layer), _of_layer(hf, "moe_topk", layer)
        shape = read_experts(hf, num_experts, top_k, is_normalized=True)
        return replace(shape, shared_width=shape.width)


def _of_layer(hf: HFConfig, key: str, layer: int) -> int:
    """A size, of all layers or from a list of theirs."""
    values, num_layers = hf.get(key), hf.size("num_hidden_layers")
    if not isinstance(values, list):
        return hf.size(key, 1)
    if len(values) != num_layers:
        raise CheckpointError(f"{hf.source}: {key!r} must be a number, or a list of {num_layers}, one per layer")
    return HFConfig({key: values[layer]}, hf.source).size(key)
