"""Digests of what the variant `amx` computes, one in a line: run by two builds of the extension, they must be equal."""

import hashlib

import torch

from quire import kernels
from quire.kernels.backends import choose_cpu_backend, register_backend
from tests.kernels.test_matmul import randn
from tests.kernels.test_quantized_formats import random_blocks

FORMATS = ("int8", "int4")


def main() -> None:
    """Print the digests."""
    register_backend("cpu", choose_cpu_backend("amx"))
    for n, k in ((33, 7), (96, 160), (64, 2051)):
        weight = randn(n, k, seed=n).bfloat16()
        narrow = kernels.pack_blocks(random_blocks("q6_k", n, 2), 512, torch.bfloat16, "q6_k")
        for matrix in (kernels.pack_weight(weight), *(kernels.quantize_weight(weight, f) for f in FORMATS), narrow):
            for rows in (1, 9, 16, 37, 200):
                x = randn(rows, matrix.k, seed=rows).bfloat16()
                _show(f"{matrix.nbytes} x {rows}", kernels.matmul(x, matrix, None, torch.float32))
    for head_dim, query_len in ((64, 1), (64, 40), (32, 300), (128, 33)):
        keys = randn(30, 2, head_dim // 2, 16, 2, seed=head_dim).bfloat16()
        values = randn(30, 2, 16, head_dim, seed=query_len).bfloat16()
        query = randn(query_len, 6, head_dim).bfloat16()
        starts, lengths = torch.tensor([0, query_len]).int(), torch.tensor([query_len + 77]).int()
        table = torch.randperm(30, generator=torch.Generator().manual_seed(1)).int()[None]
        _show(f"{head_dim} x {query_len}", kernels.paged_attention(query, keys, values, starts, lengths, table, 0.1))
    for num_heads, query_len, block_size in ((16, 1, 16), (3, 20, 16), (20, 5, 12)):
        cache, query = randn(20, block_size, 96, seed=num_heads).bfloat16(), randn(query_len, num_heads, 96).bfloat16()
        starts, lengths = torch.tensor([0, query_len]).int(), torch.tensor([query_len + 140]).int()
        table = torch.randperm(20, generator=torch.Generator().manual_seed(1)).int()[None]
        latents = kernels.latent_attention(query, cache, starts, lengths, table, 64, 0.1)
        _show(f"latents of {block_size}, {num_heads} x {query_len}", latents)


def _show(name: str, tensor: torch.Tensor) -> None:
    print(name, hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
