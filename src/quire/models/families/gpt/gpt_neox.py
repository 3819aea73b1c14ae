"""GPT-NeoX (Black et al. 2022) and Pythia: attention and MLP side by side, each with its own layer norm."""

from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import Setting
from quire.models.decoder.shapes import Arrangement, QKVLayout
from quire.models.layers.norm import NormShape


class GPTNeoXForCausalLM(Decoder):
    """Without `use_parallel_residual`, one after the other."""

    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^gpt_neox\.", ""),
        (r"^embed_in\.", "embed_tokens."),
        (r"^embed_out\.", "lm_head."),
        (r"^final_layer_norm\.", "norm."),
        (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    )
    fused: ClassVar = {}
    ignored: ClassVar = (r"\.attention\.(bias|masked_bias)$", r"\.rotary_emb\.inv_freq$")
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    default_activation = "gelu"
    has_gated_mlp = False
    qkv_bias: ClassVar[Setting] = ("attention_bias", True)
    o_bias: ClassVar[Setting] = ("attention_bias", True)
    mlp_bias = True
    qkv_layout = QKVLayout.BY_GROUP

    @classmethod
    def arrangement_of(cls, hf: HFConfig) -> Arrangement:
        is_parallel = hf.flag("use_parallel_residual", True)
        return Arrangement.PARALLEL_TWO_NORMS if is_parallel else Arrangement.PRE_NORM
