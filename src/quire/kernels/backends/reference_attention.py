"""The definitions of attention in plain torch, beside the other definitions in reference.py."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels.backends.reference import gather_kv, softcap
from quire.kernels.checks import check_range
from quire.kernels.variants import PLAIN, UNMASKED, AttentionVariant, DistanceTerms, EncoderVariant, Sequences


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, seqs: Sequences, scale: float, variant: AttentionVariant = PLAIN
) -> Tensor:
    """Causal attention of a mixed batch over the paged cache (Kwon et al. 2023): decode, chunk and prefill alike.

    query [num_tokens, num_heads, head_dim]. Of `seqs`, sequence s owns rows query_start[s] to query_start[s + 1], the
    last tokens of its seq_lens[s] tokens; block_tables [num_seqs, max_blocks]. Query head h reads key/value head
    h // (num_heads / num_kv_heads). A position p sees keys up to p, from `_first_key` on; the variant says what becomes
    of their scores. Returns [num_tokens, num_heads, head_dim].
    """
    num_blocks, _, block_size, _ = v_cache.shape
    _check_attention(query, num_blocks, block_size, seqs, variant)
    query_start, seq_lens, block_tables = seqs
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    group = query.shape[1] // k_cache.shape[1]
    for s, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(int(query_start[s]), int(query_start[s + 1]))
        positions = torch.arange(seq_len, device=query.device)
        slots = block_tables[s].long()[positions // block_size] * block_size + positions % block_size
        key, value = (t.float().repeat_interleave(group, dim=1) for t in gather_kv(k_cache, v_cache, slots))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), key) * scale  # [num_heads, query_len, seq_len]
        query_positions = positions[seq_len - scores.shape[1] :, None]
        if variant.softcap is not None:
            softcap(scores, variant.softcap)
        if variant.slopes is not None:
            scores = scores + variant.slopes[:, None, None] * (positions - query_positions)
        visible = (positions <= query_positions) & (positions >= _first_key(query_positions, variant))
        scores = scores.masked_fill(~visible, -torch.inf)
        if variant.sinks is not None:
            sinks = variant.sinks[:, None, None].expand(-1, scores.shape[1], 1)
            value = F.pad(value, (0, 0, 0, 0, 0, 1))  # [seq_len + 1, num_heads, head_dim]
            scores = torch.cat([scores, sinks], dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(out.dtype)
    return out


def latent_attention(query: Tensor, cache: Tensor, seqs: Sequences, value_dim: int, scale: float) -> Tensor:
    """Causal attention over paged latents, with absorbed projections (DeepSeek-AI 2024, "DeepSeek-V2").

    query [num_tokens, num_heads, width]; cache [num_blocks, block_size, width]; the rest is as `paged_attention` says.
    All heads read the same row of a token: the row is the key, and its first `value_dim` elements are the value.
    Returns [num_tokens, num_heads, value_dim].
    """
    num_blocks, block_size, _ = cache.shape
    _check_attention(query, num_blocks, block_size, seqs, PLAIN)
    query_start, seq_lens, block_tables = seqs
    out = query.new_empty(*query.shape[:2], value_dim)
    for s, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(int(query_start[s]), int(query_start[s + 1]))
        positions = torch.arange(seq_len, device=query.device)
        keys = cache[
            block_tables[s].long()[positions // block_size], positions % block_size
        ].float()  # [seq_len, width]
        scores = torch.einsum("qhd,kd->hqk", query[rows].float(), keys) * scale
        is_hidden = positions > positions[seq_len - scores.shape[1] :, None]
        probs = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,kd->qhd", probs, keys[:, :value_dim]).to(out.dtype)
    return out


def write_latents(latents: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store latents [num_tokens, rank], and behind each its rotated part of the keys [num_tokens, width - rank], in
    slots [num_tokens] of cache [num_blocks, block_size, width]."""
    num_blocks, block_size, _ = cache.shape
    check_range("write_latents: slot", slots, num_blocks * block_size)
    cache[slots // block_size, slots % block_size] = torch.cat([latents, rotary], dim=1)


def copy_latent_slots(cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
    """As `reference.copy_slots` of a cache of latents."""
    num_blocks, block_size, _ = cache.shape
    check_range("copy_slots: source slot", src_slots, num_blocks * block_size)
    check_range("copy_slots: destination slot", dst_slots, num_blocks * block_size)
    cache[dst_slots // block_size, dst_slots % block_size] = cache[src_slots // block_size, src_slots % block_size]


def multiply_heads(x: Tensor, weights: Tensor) -> Tensor:
    """Each head's rows times its own matrix: x [num_tokens, num_heads, k + tail], weights [num_heads, n, k] ->
    [num_tokens, num_heads, n + tail], where what x has beyond k stands behind the products as it is."""
    k = weights.shape[2]
    products = torch.einsum("thk,hnk->thn", x[:, :, :k].float(), weights.float()).to(x.dtype)
    return torch.cat([products, x[:, :, k:]], dim=2)


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    variant: EncoderVariant = UNMASKED,
    terms: DistanceTerms | None = None,
) -> Tensor:
    """Attention of whole sequences to themselves, which lie one after another (Vaswani et al. 2017).

    Sequence s owns rows query_start[s] to query_start[s + 1] of query, key and value. Query head h reads key/value head
    h // (num_heads / num_kv_heads). The variant says what becomes of scores, and terms are added before.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts, group = query_start.tolist(), query.shape[1] // key.shape[1]
    if starts[0] != 0 or starts[-1] != len(query) or seq_lens.tolist() != query_start.diff().tolist():
        raise KernelError(f"encoder_attention: query_start {starts} does not part {len(query)} rows as seq_lens does")
    if terms is not None:
        tables = [table for table in (terms.of_query, terms.of_key) if table is not None]
        check_range("encoder_attention: term", terms.term, tables[0].shape[2])
    for start, end in pairwise(starts):
        rows, positions = slice(start, end), torch.arange(end - start, device=query.device)
        keys, values = (t[rows].float().repeat_interleave(group, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys)  # [num_heads, len, len]
        distances = positions[None] - positions[:, None]  # [queries, keys]
        if terms is not None:
            term = terms.term.long()[_places(distances, len(terms.term) // 2)]
            if terms.of_query is not None:
                scores += terms.of_query[rows].transpose(0, 1).gather(2, term.expand_as(scores))
            if terms.of_key is not None:
                of_key = terms.of_key[rows].transpose(0, 1).gather(2, term.T.expand_as(scores))
                scores += of_key.transpose(1, 2)
        scores = scores * scale
        if variant.slopes is not None:
            scores = scores - variant.slopes[:, None, None] * distances.abs()
        if variant.bias is not None:
            scores = scores + variant.bias[:, _places(distances, variant.bias.shape[1] // 2 - 8)]
        if variant.window is not None:
            scores = scores.masked_fill(distances.abs() > variant.window, -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out


def _places(distances: Tensor, reach: int) -> Tensor:
    """Where distances are found in a table of those from -reach to reach."""
    if len(distances) > reach + 1:
        raise KernelError(f"encoder_attention: {len(distances)} tokens, but relative positions reach {reach}")
    return distances + reach


def _first_key(positions: Tensor, variant: AttentionVariant) -> Tensor:
    """The first position that tokens at these positions see."""
    first = torch.zeros_like(positions)
    if variant.sliding_window is not None:
        first = (positions - variant.sliding_window + 1).clamp(min=0)
    if variant.chunk_size is not None:
        first = first.maximum(positions // variant.chunk_size * variant.chunk_size)
    return first


def _check_attention(
    query: Tensor, num_blocks: int, block_size: int, seqs: Sequences, variant: AttentionVariant
) -> None:
    """Raise KernelError unless the ranges of queries and blocks fit."""
    query_start, seq_lens, block_tables = seqs
    starts = query_start.tolist()
    if starts[0] != 0 or starts[-1] != len(query) or starts != sorted(starts):
        raise KernelError(f"paged_attention: query_start must rise from 0 to {len(query)}, it is {starts}")
    for s, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[s + 1] - starts[s]
        blocks = -(-seq_len // block_size)
        if query_len > seq_len or (query_len and blocks > block_tables.shape[1]):
            raise KernelError(
                f"paged_attention, sequence {s}: {query_len} query tokens of {seq_len} in all do not fit a block table "
                f"of {block_tables.shape[1]} blocks of {block_size}"
            )
        first_key = int(_first_key(seq_lens[s] - query_len, variant))
        used = block_tables[s, first_key // block_size : blocks] if query_len else block_tables[s, :0]
        for block in used[(used < 0) | (used >= num_blocks)][:1].tolist():
            raise KernelError(f"paged_attention, sequence {s}: block id {block} is not in [0, {num_blocks})")
