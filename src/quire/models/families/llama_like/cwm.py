"""CWM (Meta FAIR 2025): Llama with a sliding window in three of four layers."""

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import FULL, SLIDING, layer_type

_DEFAULT_WINDOW = 8192
_PERIOD = 4


class CwmForCausalLM(Decoder):
    """`layer_types` names the layers with a window: by default all but the first of each four."""

    default_head_dim = 128
    mlp_bias = ("mlp_bias", False)

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        has_window = hf.get("sliding_window", _DEFAULT_WINDOW) not in (None, 0)
        is_sliding = layer_type(hf, layer, lambda i: SLIDING if i % _PERIOD else FULL) == SLIDING
        return hf.size("sliding_window", _DEFAULT_WINDOW) if has_window and is_sliding else None
