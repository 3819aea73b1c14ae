"""MiniMax-M2 (2025): norms over all queries and keys, and experts chosen by sigmoids in each layer."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.config.model import rope_config
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import read_experts
from quire.models.decoder.shapes import Span
from quire.models.families.mixtures.mixtral import EXPERT_RENAMES
from quire.models.layers.experts import ExpertsShape
from quire.models.layers.rotary import RopeShape


class MiniMaxM2ForCausalLM(Decoder):
    """The first configs say how much of a head is rotated by `rotary_dim`."""

    renames = (*Decoder.renames, *EXPERT_RENAMES, (r"\.mlp\.e_score", ".mlp.gate.e_score"))
    default_head_dim = 128
    has_head_norm = True
    head_norm_span = Span.PROJECTION

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        rotary_dim = None if hf.get("rotary_dim") is None else hf.size("rotary_dim")
        return RopeShape.read(rope_config(hf), head_dim, rotary_dim=rotary_dim)

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = hf.size("num_local_experts", 256), hf.size("num_experts_per_tok", 8)
        shape = read_experts(hf, num_experts, top_k, scoring="sigmoid", is_normalized=True)
        return replace(shape, correction_shape=(num_experts,))
