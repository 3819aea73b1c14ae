"""The layout of a KV cache: how many blocks fit, how layers share them, and what a sequence takes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from quire.common.errors import ConfigError, OutOfMemoryError
from quire.config import kv_cache
from quire.config.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LatentSpec,
    SlidingWindowSpec,
    attention_spec,
)
from quire.config.kv_layout import group_layers, kv_cache_config, with_draft_layers
from quire.config.parallel import Shard

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
    advice = "Raise what limits it (kv_cache_memory, num_gpu_blocks_override, memory_limit, gpu_memory_utilization)"
    assert str(caught.value) == f"{have} too little for the KV cache: {needed}. {advice}, or lower block_size"


def test_layers_that_keep_nothing_need_no_memory() -> None:
    specs = [NoCacheSpec()] * 3
    assert [group.layer_ids for group in group_layers(specs, 4)] == [(0, 1, 2)]
    config = kv_cache_config(specs, 4, num_bytes=1000, host_bytes=1000)
    assert (config.num_blocks, config.num_host_blocks, config.total_bytes) == (0, 0, 0)


def test_a_layer_with_latents_keeps_one_row_of_each_token() -> None:
    spec = LatentSpec(64, 16, "bfloat16")
    assert (spec.width, spec.bytes_per_token, spec.block_bytes(4)) == (80, 160, 640)
    assert [spec.max_blocks(num_tokens, 4, max_chunk=2) for num_tokens in (1, 4, 5, 9)] == [1, 1, 2, 3]
    assert spec.with_dtype("float32") == LatentSpec(64, 16, "float32")
    with pytest.raises(ConfigError) as refused:
        spec.with_dtype("int8")
    assert str(refused.value).startswith("kv_cache_dtype='int8': this model keeps one latent for all heads")
    assert str(refused.value).endswith("no dtype but float32 and bfloat16; leave it at auto")
    assert spec.of_rank(Shard(1, 2)) == spec, "which each rank keeps whole"


def test_heads_are_divided_among_ranks_and_kept_in_another_dtype() -> None:
    spec = attention_spec(3, 8, "float32", 16)
    assert [spec.of_rank(Shard(rank, 2)) for rank in range(2)] == [
        attention_spec(2, 8, "float32", 16),
        attention_spec(1, 8, "float32", 16),
    ]
    assert spec.with_dtype("int8") == attention_spec(3, 8, "int8", 16)
    assert spec.with_dtype("int8").bytes_per_token == 2 * 3 * (8 + 4)
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8': this model's heads have 6 dimensions"):
        attention_spec(3, 6, "float32").with_dtype("int8")


def test_a_layer_that_keeps_nothing_has_no_blocks() -> None:
    spec = kv_cache.NoCacheSpec()
    assert (spec.block_bytes(4), spec.max_blocks(100, 4, None)) == (0, 0)
    assert KVCacheConfig(4, 0, (KVCacheGroup((0,), spec),)).keeps_nothing
    assert not kv_cache_config([SPEC], 4, num_blocks=1).keeps_nothing


# Draft models

FULL, WIDE, NARROW = SPEC, attention_spec(2, 64, "bfloat16", 32), attention_spec(2, 64, "bfloat16", 8)


@pytest.mark.parametrize(
    ("groups", "draft", "place"),
    [
        ([FULL], [FULL], 0),
        ([NARROW, WIDE, FULL, FULL], [NARROW, FULL], 2),
        ([NARROW, WIDE, FULL], [WIDE], 1),
        ([NARROW, WIDE, FULL], [NARROW], 0),
        ([NARROW, WIDE, FULL], [NARROW, WIDE], 1),
        ([kv_cache.NoCacheSpec(), FULL], [FULL], 1),
    ],
)
def test_layers_of_a_draft_model_lie_in_the_first_group_that_keeps_what_they_see(
    groups: list[KVCacheSpec], draft: list[KVCacheSpec], place: int
) -> None:
    before = [KVCacheGroup((index,), spec) for index, spec in enumerate(groups)]
    after = with_draft_layers(before, draft)
    assert [group.draft_specs for group in after] == [tuple(draft) if at == place else () for at in range(len(groups))]
    assert [(group.layer_ids, group.spec) for group in after] == [(group.layer_ids, group.spec) for group in before]


@pytest.mark.parametrize(
    ("groups", "draft", "said"),
    [
        (
            [NARROW, WIDE],
            [FULL],
            "layer 0 of the draft model or head sees all tokens, but .* model keep at most {wide};",
        ),
        ([NARROW], [NARROW, WIDE], "layer 1 of .* sees {wide} tokens, but the layers .* keep at most {narrow};"),
        ([kv_cache.NoCacheSpec()], [FULL], "layer 0 of .* sees all tokens, but .* keep at most 0;"),
        ([FULL], [kv_cache.NoCacheSpec()], "layer 0 of .* sees 0 tokens"),
    ],
)
def test_a_draft_model_that_sees_more_than_any_layer_keeps_is_refused(
    groups: list[KVCacheSpec], draft: list[KVCacheSpec], said: str
) -> None:
    message = "^speculative_config: " + said.format(wide=WIDE.sliding_window, narrow=NARROW.sliding_window)
    with pytest.raises(ConfigError, match=message):
        with_draft_layers([KVCacheGroup((index,), spec) for index, spec in enumerate(groups)], draft)


def test_a_block_has_room_for_the_draft_models_layers() -> None:
    small = attention_spec(1, 64, "bfloat16")
    config = kv_cache_config([FULL, FULL], 4, num_blocks=3, draft_specs=[small])
    assert [group.draft_specs for group in config.groups] == [(small,)]
    assert config.block_bytes == 4 * (2 * TOKEN_BYTES + TOKEN_BYTES // 2)
    assert config.bytes_per_token == 2 * TOKEN_BYTES + TOKEN_BYTES // 2
    divided = config.of_rank(Shard(1, 2))
    assert divided.block_bytes == 4 * (TOKEN_BYTES + TOKEN_BYTES // 2), "the one head of the draft model twice"
    assert (divided.num_ranks, divided.num_machines) == (1, 1)


# Ranks, machines and stages


def test_a_cache_of_one_process_is_that_by_default() -> None:
    config = kv_cache_config([SPEC] * 2, 4, num_blocks=3)
    assert (config.num_ranks, config.num_machines, config.stages) == (1, 1, ())
    assert config == KVCacheConfig(4, 3, (KVCacheGroup((0, 1), SPEC),))


def test_a_cache_is_divided_as_its_arguments_say() -> None:
    given = {"num_ranks": 4, "num_machines": 2, "stages": ((0, 1), (1, 2)), "max_chunk": 7}
    config = kv_cache_config([SPEC] * 2, 4, num_blocks=3, **given)
    assert config == KVCacheConfig(4, 3, (KVCacheGroup((0, 1), SPEC),), **given)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, 2),
        ({"num_ranks": 2}, 2),
        ({"num_ranks": 4}, 4),
        ({"num_ranks": 4, "num_machines": 2}, 2),
        ({"stages": ((0, 1),)}, 1),
        ({"stages": ((0, 1), (1, 2))}, 2),
        ({"stages": ((0, 1),), "num_ranks": 2}, 1),
    ],
)
def test_a_block_is_what_all_processes_of_this_machine_keep_of_it(given: dict[str, Any], parts: int) -> None:
    """In units of what one layer keeps, of whose two heads each rank has one, which four ranks keep twice."""
    config = kv_cache_config([SPEC] * 2, 4, num_blocks=3, **given)
    assert config.block_bytes == parts * 4 * TOKEN_BYTES
    assert config.bytes_per_token == parts * TOKEN_BYTES
    assert config.total_bytes == 3 * config.block_bytes
