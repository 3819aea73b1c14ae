"""GPT-J (Wang and Komatsuzaki 2021): attention and a plain MLP read one layer norm, and heads are rotated in pairs."""

from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import rope_config
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import Arrangement
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape


class GPTJForCausalLM(Decoder):
    """The head has a bias, and attention has none."""

    renames: ClassVar = (
        (r"^transformer\.", ""),
        (r"^wte\.", "embed_tokens."),
        (r"^ln_f\.", "norm."),
        (r"^h\.", "layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.attn\.([qkv])_proj\.", r".self_attn.\1_proj."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
        (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
    )
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    default_activation = "gelu_new"
    default_mlp_ratio = 4
    arrangement = Arrangement.PARALLEL
    has_gated_mlp = False
    mlp_bias = head_bias = True

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        return RopeShape.read(
            rope_config(hf), head_dim, is_interleaved=True, rotary_dim=hf.size("rotary_dim", head_dim)
        )
