"""gpt-oss (OpenAI 2025): experts with biases in every layer, attention with sinks, windows in every second layer."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.kernels import ClampedSwiGLU
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import FULL, SLIDING, layer_type, read_routing
from quire.models.decoder.shapes import AttentionShape
from quire.models.layers.experts import ExpertsShape
from quire.models.weights.stacked import Stack

_DEFAULT_WINDOW = 128


class GptOssForCausalLM(Decoder):
    """The rows of an expert's gate and second half lie in turn; plain numbers are stored as [in, out]."""

    renames = (*Decoder.renames, (r"\.mlp\.router\.", ".mlp.gate."), (r"\.self_attn\.sinks$", ".self_attn.attn.sinks"))
    default_head_dim = 64
    qkv_bias = o_bias = ("attention_bias", True)

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        both, down = (".experts.{}.gate_proj.", ".experts.{}.up_proj."), (".experts.{}.down_proj.",)
        made = []
        for name, modules in (("gate_up_proj", both), ("down_proj", down)):
            plain, others = (tuple(module + own for module in modules) for own in ("weight", r"weight_\1"))
            biases = tuple(f"{module}bias" for module in modules)
            made += [
                Stack(rf"\.experts\.{name}$", plain, is_interleaved=True, is_transposed=True),
                Stack(rf"\.experts\.{name}_(blocks|scales)$", others, is_interleaved=True),
                Stack(rf"\.experts\.{name}_bias$", biases, is_interleaved=True),
            ]
        return tuple(made)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(super().attention_shape(hf, layer), has_sinks=True)

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        is_sliding = layer_type(hf, layer, lambda i: FULL if i % 2 else SLIDING) == SLIDING
        return hf.size("sliding_window", _DEFAULT_WINDOW) if is_sliding else None

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = hf.size("num_local_experts", 128), hf.size("num_experts_per_tok", 4)
        routing = read_routing(hf, num_experts, top_k, is_normalized=True)
        kind = ClampedSwiGLU(hf.number("swiglu_limit", 7.0), hf.number("swiglu_alpha", 1.702))
        return ExpertsShape(routing, hf.size("intermediate_size"), kind, bias=True, router_bias=True)
