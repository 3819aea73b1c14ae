"""One thin wrapper per kernel: it checks its arguments and calls the backend of the device that they are on."""

from quire.kernels.attention import encoder_attention, latent_attention, paged_attention
from quire.kernels.backends import backend_for, backend_of, isa, num_threads, register_backend, set_num_threads
from quire.kernels.backends.base import Backend
from quire.kernels.backends.recording import KernelGraph
from quire.kernels.backends.shapes import Meter
from quire.kernels.backends.workspace import Workspace, borrowed
from quire.kernels.elementwise import (
    activation,
    add,
    add_layer_norm,
    add_rms_norm,
    clip,
    gated_activation,
    head_layer_norm,
    layer_norm,
    rms_norm,
    scale,
    softcap,
)
from quire.kernels.embedding import embedding, rotary_embedding
from quire.kernels.experts.products import combine_experts, expert_matmul, group_by_expert, route
from quire.kernels.experts.weights import ExpertRows, ExpertWeights, Routing
from quire.kernels.kv_cache import (
    copy_blocks,
    copy_latent_slots,
    copy_slots,
    gather_kv,
    make_latent_cache,
    make_layer_cache,
    write_kv,
    write_latents,
)
from quire.kernels.lora import add_lora, pack_lora
from quire.kernels.matmul import matmul, multiply_heads, pack_heads, pack_weight, unpack_weight
from quire.kernels.pooling import embedding_norm, pool_rows
from quire.kernels.quantized import (
    block_size,
    integer_format,
    mapped_weight,
    pack_blocks,
    pack_integers,
    quantize_weight,
    quantized_bytes,
)
from quire.kernels.sampling.draws import processed_logits, sample, top_logprobs
from quire.kernels.sampling.tensors import LogitChanges, SamplingTensors, TokenLists
from quire.kernels.variants import XIELU, ActivationKind, AttentionVariant, ClampedSwiGLU, DistanceTerms, EncoderVariant
from quire.kernels.weights import (
    BLOCK_FORMATS,
    QUANTIZED_FORMATS,
    HeadWeights,
    LoRATable,
    LoRAWeight,
    Matrix,
    PackedWeight,
    QuantizedWeight,
    StackedWeight,
)

__all__ = [
    "BLOCK_FORMATS",
    "QUANTIZED_FORMATS",
    "XIELU",
    "ActivationKind",
    "AttentionVariant",
    "Backend",
    "ClampedSwiGLU",
    "DistanceTerms",
    "EncoderVariant",
    "ExpertRows",
    "ExpertWeights",
    "HeadWeights",
    "KernelGraph",
    "LoRATable",
    "LoRAWeight",
    "LogitChanges",
    "Matrix",
    "Meter",
    "PackedWeight",
    "QuantizedWeight",
    "Routing",
    "SamplingTensors",
    "StackedWeight",
    "TokenLists",
    "Workspace",
    "activation",
    "add",
    "add_layer_norm",
    "add_lora",
    "add_rms_norm",
    "backend_for",
    "backend_of",
    "block_size",
    "borrowed",
    "clip",
    "combine_experts",
    "copy_blocks",
    "copy_latent_slots",
    "copy_slots",
    "embedding",
    "embedding_norm",
    "encoder_attention",
    "expert_matmul",
    "gated_activation",
    "gather_kv",
    "group_by_expert",
    "head_layer_norm",
    "integer_format",
    "isa",
    "latent_attention",
    "layer_norm",
    "make_latent_cache",
    "make_layer_cache",
    "mapped_weight",
    "matmul",
    "multiply_heads",
    "num_threads",
    "pack_blocks",
    "pack_heads",
    "pack_integers",
    "pack_lora",
    "pack_weight",
    "paged_attention",
    "pool_rows",
    "processed_logits",
    "quantize_weight",
    "quantized_bytes",
    "register_backend",
    "rms_norm",
    "rotary_embedding",
    "route",
    "sample",
    "scale",
    "set_num_threads",
    "softcap",
    "top_logprobs",
    "unpack_weight",
    "write_kv",
    "write_latents",
]
