"""Mixtral (Jiang et al. 2024): Llama with experts in each layer."""

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import read_experts
from quire.models.layers.experts import ExpertsShape

EXPERT_RENAMES = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
)


class MixtralForCausalLM(Decoder):
    """The weights of a token's experts are a softmax over their logits alone."""

    renames = (*Decoder.renames, *EXPERT_RENAMES)
    has_window = True

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = hf.size("num_local_experts", 8), hf.size("num_experts_per_tok", 2)
        return read_experts(hf, num_experts, top_k, is_normalized=True)
