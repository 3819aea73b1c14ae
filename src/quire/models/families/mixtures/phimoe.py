"""Phi-3.5-MoE (Abdin et al. 2024): layer norms with biases, and two experts chosen by SparseMixer-v2."""

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import rope_config
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import read_experts
from quire.models.families.mixtures.mixtral import EXPERT_RENAMES
from quire.models.layers.experts import ExpertsShape
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape


class PhimoeForCausalLM(Decoder):
    """`longrope` has one factor of attention for all lengths here; a config with two is refused."""

    renames = (*Decoder.renames, *EXPERT_RENAMES)
    qkv_bias = o_bias = ("attention_bias", False)
    head_bias = ("lm_head_bias", False)
    has_window = True

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        return NormShape(hf.number("rms_norm_eps", 1e-5), is_rms=False, has_bias=True)

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        rope = rope_config(hf)
        if rope.text("rope_type") != "default":
            factor = rope.number("short_mscale")
            if rope.number("long_mscale") != factor:
                raise UnsupportedModelError(f"{rope.source}: short_mscale and long_mscale must be equal")
            rope = rope.replaced({"attention_factor": factor})
        return RopeShape.read(rope, head_dim)

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = hf.size("num_local_experts", 16), hf.size("num_experts_per_tok", 2)
        jitter = hf.number("router_jitter_noise", 0.01)
        return read_experts(hf, num_experts, top_k, scoring="sparsemixer", jitter=jitter)
