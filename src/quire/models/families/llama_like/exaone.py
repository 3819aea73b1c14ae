"""EXAONE 3 and 3.5 (LG AI Research 2024), Llama with the names of GPT-2, and EXAONE 4, with other norms and layers."""

from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import FULL, SLIDING, layer_type
from quire.models.decoder.shapes import Arrangement
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape

_DEFAULT_PERIOD = 4


class ExaoneForCausalLM(Decoder):
    """All sizes of version 3."""

    renames: ClassVar = (
        (r"^transformer\.", ""),
        (r"^wte\.", "embed_tokens."),
        (r"^ln_f\.", "norm."),
        (r"^h\.", "layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.out_proj\.", ".o_proj."),
        (r"\.c_fc_0\.", ".gate_proj."),
        (r"\.c_fc_1\.", ".up_proj."),
        (r"\.c_proj\.", ".down_proj."),
    )

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        return NormShape(hf.number("layer_norm_eps", 1e-5))


class Exaone4ForCausalLM(Decoder):
    """Norms of outputs and of heads, and layers that see all without a rotary embedding.

    Without `sliding_window`, all layers see all and have a rotary embedding (the 1.2B).
    """

    default_norm = NormShape(1e-5)
    arrangement = Arrangement.OUTPUT_NORM
    has_head_norm = True

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        return hf.size("sliding_window") if _is_sliding(hf, layer) else None

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        is_rotated = hf.get("sliding_window") is None or _is_sliding(hf, layer)
        return super().rope_shape(hf, layer, head_dim) if is_rotated else None


def _is_sliding(hf: HFConfig, layer: int) -> bool:
    def default(i: int) -> str:
        return SLIDING if (i + 1) % hf.size("sliding_window_pattern", _DEFAULT_PERIOD) else FULL

    return hf.get("sliding_window") is not None and layer_type(hf, layer, default) == SLIDING
