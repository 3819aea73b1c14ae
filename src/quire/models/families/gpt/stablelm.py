"""StableLM (Bellagente et al. 2024): layer norms, a gated MLP, and a partial rotary embedding."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import Arrangement, AttentionShape, HeadNormShape, Span
from quire.models.layers.norm import NormShape


class StableLmForCausalLM(Decoder):
    """With `use_parallel_residual`, attention and MLP read one norm."""

    renames: ClassVar = ((r"^model\.", ""), (r"\.([qk])_layernorm\.", r".\1_norm."))
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    qkv_bias = ("use_qkv_bias", False)

    @classmethod
    def arrangement_of(cls, hf: HFConfig) -> Arrangement:
        return Arrangement.PARALLEL if hf.flag("use_parallel_residual", False) else Arrangement.PRE_NORM

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        norm = HeadNormShape(replace(cls.norm_shape(hf), has_bias=False), Span.EACH_HEAD, is_apart=True)
        return replace(super().attention_shape(hf, layer), head_norm=norm if hf.flag("qk_layernorm", False) else None)
