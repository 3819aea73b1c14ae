"""How far a native kernel may be from the torch reference: relative and absolute, per kernel and dtype.

The reference rounds once, on the way out; so do the native kernels, after summing in another order. A bfloat16 result
may therefore fall on the neighbouring value (relative 2^-7), and near zero differ by what float32 sums differ by.
Inputs are of order 1, and so are products. Torch computes gelu as x / 2 * (1 + erf), which leaves small results few
digits. Where the CPU multiplies pairs of bfloat16, attention over a bfloat16 cache rounds probabilities to it: the
error is up to 2^-9 of the values they weigh. Over an int8 KV cache the native kernel rounds queries and probabilities
to 2^-16 of the largest, the reference does not. The native tanh is within 5e-7 of its value.
"""

import torch
from torch import Tensor

TOLERANCES: dict[tuple[str, torch.dtype], tuple[float, float]] = {
    ("matmul", torch.float32): (1e-5, 1e-5),
    ("matmul", torch.bfloat16): (2**-7, 1e-5),
    ("add_lora", torch.float32): (1e-5, 1e-5),
    ("add_lora", torch.bfloat16): (2**-7, 1e-5),
    ("route", torch.float32): (1e-5, 1e-7),
    ("combine_experts", torch.float32): (1e-5, 1e-5),
    ("combine_experts", torch.bfloat16): (2**-7, 1e-5),
    ("rms_norm", torch.float32): (1e-6, 1e-6),
    ("rms_norm", torch.bfloat16): (2**-7, 1e-6),
    ("add_rms_norm", torch.float32): (1e-6, 1e-6),
    ("add_rms_norm", torch.bfloat16): (2**-7, 1e-6),
    ("layer_norm", torch.float32): (1e-5, 2e-6),
    ("layer_norm", torch.bfloat16): (2**-7, 2e-6),
    ("add_layer_norm", torch.float32): (1e-5, 2e-6),
    ("add_layer_norm", torch.bfloat16): (2**-7, 2e-6),
    ("head_layer_norm", torch.float32): (1e-5, 2e-6),
    ("head_layer_norm", torch.bfloat16): (2**-7, 2e-6),
    ("activation", torch.float32): (1e-6, 2e-6),
    ("activation", torch.bfloat16): (2**-7, 2e-6),
    ("scale", torch.float32): (0.0, 0.0),
    ("scale", torch.bfloat16): (0.0, 0.0),
    ("softcap", torch.float32): (1e-6, 1e-30),
    ("gated_activation", torch.float32): (1e-6, 1e-5),
    ("gated_activation", torch.bfloat16): (2**-7, 1e-5),
    ("rotary_embedding", torch.float32): (0.0, 0.0),
    ("rotary_embedding", torch.bfloat16): (0.0, 0.0),
    ("embedding", torch.float32): (0.0, 0.0),
    ("embedding", torch.bfloat16): (0.0, 0.0),
    ("paged_attention", torch.float32): (1e-5, 1e-5),
    ("paged_attention", torch.bfloat16): (2**-7, 1e-5),
    ("paged_attention_pairs", torch.bfloat16): (2**-7, 2**-8),
    ("paged_attention_int8", torch.float32): (1e-4, 3e-4),
    ("paged_attention_int8", torch.bfloat16): (2**-7, 3e-4),
    ("latent_attention", torch.float32): (1e-5, 1e-5),
    ("latent_attention", torch.bfloat16): (2**-7, 1e-5),
    ("latent_attention_pairs", torch.bfloat16): (2**-7, 2**-8),
    ("multiply_heads", torch.float32): (1e-5, 1e-5),
    ("multiply_heads", torch.bfloat16): (2**-7, 1e-5),
    ("encoder_attention", torch.float32): (1e-5, 1e-5),
    ("encoder_attention", torch.bfloat16): (2**-7, 1e-5),
    ("encoder_attention_pairs", torch.bfloat16): (2**-7, 2**-8),
    ("embedding_norm", torch.float32): (1e-5, 4e-6),
    ("embedding_norm", torch.bfloat16): (2**-7, 4e-6),
    ("pool_rows", torch.float32): (1e-5, 2e-6),
    ("top_logprobs", torch.float32): (1e-6, 1e-6),
}


def assert_close(kernel: str, actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[kernel, expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
