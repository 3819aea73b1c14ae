"""The layout of a KV cache: how many blocks fit, how layers share them, and what a sequence takes of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from quire.common.errors import OutOfMemoryError
from quire.config.kv_cache import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, attention_spec
from quire.config.kv_layout import group_layers, kv_cache_config

SPEC = FullAttentionSpec(2, 64, "bfloat16")
TOKEN_BYTES = 2 * 2 * 64 * 2


@dataclass(frozen=True, slots=True)
class NoCacheSpec(KVCacheSpec):
    """A layer that keeps nothing."""

    def block_bytes(self, block_size: int) -> int:
        return 0

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int | None) -> int:
        return 0


def test_a_layer_is_described_by_its_heads_and_its_window() -> None:
    assert attention_spec(2, 64, "bfloat16") == SPEC
    assert attention_spec(2, 64, "bfloat16", 128) == SlidingWindowSpec(2, 64, "bfloat16", sliding_window=128)


@pytest.mark.parametrize(("window", "num_blocks"), [(4, 4), (5, 5), (8, 5), (9, 6)])
def test_a_layer_with_a_window_holds_its_blocks_those_of_a_chunk_and_the_partly_used_ones(
    window: int, num_blocks: int
) -> None:
    spec = attention_spec(1, 2, "float32", window)
    assert spec.max_blocks(1000, 4, max_chunk=4) == num_blocks
    assert spec.max_blocks(9, 4, max_chunk=4) == 3, "as many as its tokens need"
    assert spec.max_blocks(1000, 4, max_chunk=None) == 250


@pytest.mark.parametrize("num_blocks", [1, 2**20])
def test_the_blocks_limit_the_length_of_a_sequence_where_a_layer_keeps_all_tokens(num_blocks: int) -> None:
    config = kv_cache_config([SPEC], 16, num_blocks=num_blocks)
    assert config.max_tokens == num_blocks * 16
    assert config.is_length_bounded


def test_the_blocks_do_not_limit_the_length_where_every_layer_forgets() -> None:
    config = kv_cache_config([attention_spec(2, 64, "bfloat16", 32)], 16, num_blocks=100, max_chunk=64)
    assert not config.is_length_bounded


def test_a_cache_of_one_block_of_one_token_is_enough() -> None:
    config = kv_cache_config([SPEC], 1, num_bytes=TOKEN_BYTES)
    assert (config.num_blocks, config.max_tokens) == (1, 1)
    assert config == kv_cache_config([SPEC], 1, num_blocks=1)


def test_both_tiers_have_the_whole_blocks_that_fit() -> None:
    config = kv_cache_config([SPEC], 4, num_bytes=12 * TOKEN_BYTES - 1, host_bytes=20 * TOKEN_BYTES + 1, max_chunk=7)
    assert (config.num_blocks, config.num_host_blocks, config.max_chunk) == (2, 5, 7)
    assert kv_cache_config([SPEC], 4, num_blocks=3).num_host_blocks == 0


@pytest.mark.parametrize(
    ("amount", "have"),
    [
        ({}, "0 blocks are"),
        ({"num_blocks": 1}, "1 blocks are"),
        ({"num_bytes": 3000}, "2.93 KiB is"),
        ({"num_bytes": 0}, "0 B is"),
        ({"num_bytes": -5}, "0 B is"),
    ],
)
def test_a_cache_that_cannot_hold_one_token_in_every_group_is_refused(amount: dict[str, int], have: str) -> None:
    specs = [SPEC, attention_spec(2, 64, "bfloat16", 128)]
    with pytest.raises(OutOfMemoryError) as caught:
        kv_cache_config(specs, 4, **amount)
    needed = f"2 block(s) of 4 tokens take {2 * 4 * TOKEN_BYTES / 1024:.2f} KiB"
    assert str(caught.value).startswith(f"{have} too little for the KV cache: {needed}. ")


def test_layers_that_keep_nothing_need_no_memory() -> None:
    specs = [NoCacheSpec()] * 3
    assert [group.layer_ids for group in group_layers(specs, 4)] == [(0, 1, 2)]
    config = kv_cache_config(specs, 4, num_bytes=1000, host_bytes=1000)
    assert (config.num_blocks, config.num_host_blocks, config.total_bytes) == (0, 0, 0)
