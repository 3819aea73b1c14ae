import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import reference
from tests.effort import examples

DTYPES = [torch.float32, torch.bfloat16]


def make_cache(num_blocks=4, block_size=8, num_kv_heads=2, head_dim=6, dtype=torch.bfloat16):
    head_bytes = head_dim + 4 if dtype is torch.int8 else head_dim * dtype.itemsize
    num_bytes = num_blocks * 2 * block_size * num_kv_heads * head_bytes
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    return buffer, *kernels.make_layer_cache(buffer, num_blocks, block_size, num_kv_heads, head_dim, dtype)


@pytest.mark.essential
@given(
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 48, 64]),
    num_tokens=st.integers(0, 300),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(60), deadline=None)
def test_written_tokens_are_where_the_reference_puts_them_and_are_gathered_back(
    dtype, block_size, num_kv_heads, head_dim, num_tokens, seed
):
    generator = torch.Generator().manual_seed(seed)
    num_blocks = num_tokens // block_size + 2
    key, value = torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator).to(dtype)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    buffer, k_cache, v_cache = make_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    expected, *expected_caches = make_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    kernels.write_kv(key, value, k_cache, v_cache, slots)
    reference.write_kv(key, value, *expected_caches, slots)
    assert torch.equal(buffer, expected)
    gathered = kernels.gather_kv(k_cache, v_cache, slots)
    assert torch.equal(gathered[0], key)
    assert torch.equal(gathered[1], value)


@given(
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([1, 3, 16]),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 12, 48, 64]),
    num_tokens=st.integers(0, 200),
    exponents=st.tuples(st.integers(-40, 30), st.integers(-40, 30)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(60), deadline=None)
def test_tokens_in_int8_are_as_the_reference_rounds_them_and_within_half_a_step(
    dtype, block_size, num_kv_heads, head_dim, num_tokens, exponents, seed
):
    generator = torch.Generator().manual_seed(seed)
    num_blocks = num_tokens // block_size + 2
    tokens = torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator, dtype=torch.float64)
    key, value = ((t * 10.0**e).to(dtype) for t, e in zip(tokens, exponents, strict=True))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    buffer, k_cache, v_cache = make_cache(num_blocks, block_size, num_kv_heads, head_dim, torch.int8)
    expected, *expected_caches = make_cache(num_blocks, block_size, num_kv_heads, head_dim, torch.int8)
    kernels.write_kv(key, value, k_cache, v_cache, slots)
    reference.write_kv(key, value, *expected_caches, slots)
    assert torch.equal(buffer, expected)
    read_key, read_value = kernels.gather_kv(k_cache, v_cache, slots)
    rotated = reference.rotate_heads(key), reference.rotate_heads(read_key)
    for written, read in (rotated, (value.float(), read_value)):
        step = written.abs().amax(-1, keepdim=True) / 127
        assert ((read - written).abs() <= 0.501 * step + 1e-30).all()


def test_int8_ties_go_to_the_even_multiple_and_a_nan_stays_with_its_head():
    _, k_cache, v_cache = make_cache(head_dim=8, dtype=torch.int8)
    key, value = torch.zeros(2, 1, 2, 8)
    value[0, 0] = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    key[0, 1] = 3.0
    value[0, 1, 4] = torch.nan
    kernels.write_kv(key, value, k_cache, v_cache, torch.tensor([5]))
    read_key, read_value = kernels.gather_kv(k_cache, v_cache, torch.tensor([5]))
    assert read_value[0, 0].tolist() == [127, -127, 0, 2, 2, 0, -2, 126]
    assert read_key[0, 0].tolist() == [0.0] * 8
    assert read_key[0, 1].tolist() == pytest.approx([3.0] * 8)
    assert read_value[0, 1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_far_larger_channel_of_keys_costs_the_others_little_of_their_precision(dtype):
    _, k_cache, v_cache = make_cache(8, 16, 2, 64, torch.int8)
    key, value = torch.randn(2, 100, 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    key[..., 7] += 100
    slots = torch.arange(100)
    kernels.write_kv(key, value, k_cache, v_cache, slots)
    errors = kernels.gather_kv(k_cache, v_cache, slots)[0] - key.float()
    assert errors.square().mean().sqrt() < 0.06  # 0.23 if they were not rotated


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_may_be_slices_of_a_fused_projection(dtype):
    fused = torch.randn(20, 7, 6).to(dtype)  # 3 query heads, 2 key heads, 2 value heads
    key, value, slots = fused[:, 3:5], fused[:, 5:], torch.arange(20)
    _, k_cache, v_cache = make_cache(dtype=dtype)
    kernels.write_kv(key, value, k_cache, v_cache, slots)
    gathered = kernels.gather_kv(k_cache, v_cache, slots)
    assert torch.equal(gathered[0], key)
    assert torch.equal(gathered[1], value)


def test_separate_key_and_value_tensors_serve_as_a_cache():
    k_cache, v_cache = torch.zeros(4, 2, 3, 8, 2, dtype=torch.bfloat16), torch.zeros(4, 2, 8, 6, dtype=torch.bfloat16)
    key, value = torch.randn(2, 5, 2, 6).bfloat16()
    slots = torch.tensor([31, 0, 8, 7, 16])
    kernels.write_kv(key, value, k_cache, v_cache, slots)
    assert torch.equal(torch.stack(kernels.gather_kv(k_cache, v_cache, slots)), torch.stack([key, value]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_copying_slots_moves_single_tokens_and_nothing_else(dtype):
    buffer, k_cache, v_cache = make_cache(head_dim=8, dtype=dtype)
    key, value = torch.randn(2, 32, 2, 8).to(torch.float32 if dtype is torch.int8 else dtype)
    kernels.write_kv(key, value, k_cache, v_cache, torch.arange(32))
    written = kernels.gather_kv(k_cache, v_cache, src_slots := torch.tensor([3, 4, 5, 31]))
    expected, *expected_caches = make_cache(head_dim=8, dtype=dtype)
    expected.copy_(buffer)
    dst_slots = torch.tensor([9, 8, 0, 30])
    kernels.copy_slots(k_cache, v_cache, src_slots, dst_slots)
    reference.copy_slots(*expected_caches, src_slots, dst_slots)
    assert torch.equal(buffer, expected)
    assert torch.equal(torch.stack(kernels.gather_kv(k_cache, v_cache, dst_slots)), torch.stack(written))


@pytest.mark.parametrize("block_bytes", [1, 100, 4096, 1 << 18, 600_000])
def test_copying_blocks_between_pools_and_within_one(block_bytes):
    src = torch.randint(256, (5, block_bytes), dtype=torch.uint8)
    dst = torch.randint(256, (7, block_bytes), dtype=torch.uint8)
    pairs = torch.tensor([[0, 6], [4, 1], [0, 2]])
    expected = dst.clone()
    reference.copy_blocks(src, expected, pairs)
    kernels.copy_blocks(src, dst, pairs)
    assert torch.equal(dst, expected)
    kernels.copy_blocks(dst, dst, torch.tensor([[6, 0], [1, 3]]))
    assert torch.equal(dst[[0, 3]], src[[0, 4]])
    kernels.copy_blocks(src, dst, torch.empty(0, 2, dtype=torch.int64))


def test_a_block_of_a_layer_is_one_run_of_bytes():
    buffer, k_cache, v_cache = make_cache(num_blocks=4)
    key, value = torch.randn(2, 8, 2, 6).bfloat16()
    kernels.write_kv(key, value, k_cache, v_cache, torch.arange(8) + 8)
    blocks = buffer.view(4, -1)
    assert not blocks[[0, 2, 3]].any()
    kernels.copy_blocks(blocks, blocks, torch.tensor([[1, 3]]))
    assert torch.equal(kernels.gather_kv(k_cache, v_cache, torch.arange(8) + 24)[0], key)


def test_a_longer_buffer_and_one_block_are_fine():
    buffer = torch.zeros(1000, dtype=torch.uint8)
    k_cache, v_cache = kernels.make_layer_cache(buffer, 1, 4, 1, 8, torch.float32)
    assert k_cache.shape == (1, 1, 8, 4, 1)
    assert v_cache.shape == (1, 1, 4, 8)


class TestRefusals:
    def test_layers_may_lie_beside_each_other_in_a_block(self):
        rows = torch.zeros(3, 2 * 384, dtype=torch.uint8)
        sizes = {"num_blocks": 3, "block_size": 8, "num_kv_heads": 2, "head_dim": 6, "dtype": torch.bfloat16}
        layers = [kernels.make_layer_cache(rows[:, start : start + 384], **sizes) for start in (0, 384)]
        for (k_cache, v_cache), value in zip(layers, (1.0, 2.0), strict=True):
            tokens = torch.full((24, 2, 6), value, dtype=torch.bfloat16)
            kernels.write_kv(tokens, tokens, k_cache, v_cache, torch.arange(24))
        for (k_cache, v_cache), value in zip(layers, (1.0, 2.0), strict=True):
            assert torch.equal(k_cache, torch.full_like(k_cache, value))
            assert torch.equal(v_cache, torch.full_like(v_cache, value))

    @pytest.mark.parametrize(
        ("buffer", "changes", "message"),
        [
            (torch.zeros(767, dtype=torch.uint8), {}, "at least 768 bytes, or 2 rows of 384; got uint8 .767."),
            (torch.zeros(768), {}, "flat uint8"),
            (torch.zeros(2, 380, dtype=torch.uint8), {}, "2 rows of 384"),
            (torch.zeros(1, 768, dtype=torch.uint8), {}, "2 rows of 384"),
            (torch.zeros(2, 2, 384, dtype=torch.uint8), {}, "flat uint8"),
            (torch.zeros(768, 2, dtype=torch.uint8)[:, 0], {}, "flat uint8"),
            (torch.zeros(2, 387, dtype=torch.uint8), {}, "multiple of 4 bytes"),
            (torch.zeros(1000, dtype=torch.uint8)[1:], {}, "multiple of 64 bytes"),
            (torch.zeros(768, dtype=torch.uint8), {"head_dim": 5}, "even head_dim, .* head_dim 5"),
            (torch.zeros(768, dtype=torch.uint8), {"dtype": torch.int8}, "multiple of 4; got .* head_dim 6"),
            (torch.zeros(767, dtype=torch.uint8), {"dtype": torch.int8, "head_dim": 8}, "at least 768 bytes"),
            (torch.zeros(768, dtype=torch.uint8), {"dtype": torch.float16}, "float32, bfloat16 .*, or int8"),
            (torch.zeros(768, dtype=torch.uint8), {"num_blocks": 0}, "positive sizes"),
        ],
    )
    def test_buffers_that_cannot_be_a_cache(self, buffer, changes, message):
        sizes = {"num_blocks": 2, "block_size": 8, "num_kv_heads": 2, "head_dim": 6, "dtype": torch.bfloat16}
        with pytest.raises(KernelError, match=message):
            kernels.make_layer_cache(buffer, **(sizes | changes))

    @pytest.mark.parametrize(
        "changes",
        [
            {"key": torch.zeros(3, 2, 6)},  # dtype
            {"key": torch.zeros(3, 1, 6, dtype=torch.bfloat16)},  # heads
            {"value": torch.zeros(2, 2, 6, dtype=torch.bfloat16)},  # tokens
            {"value": torch.zeros(3, 6, 2, dtype=torch.bfloat16).transpose(1, 2)},  # strides
            {"slots": torch.zeros(3, dtype=torch.int32)},  # dtype
            {"slots": torch.zeros(6, dtype=torch.int64)[::2]},  # strides
            {"k_cache": torch.zeros(4, 2, 6, 8, 1, dtype=torch.bfloat16)},  # pack
            {"v_cache": torch.zeros(4, 2, 6, 8, dtype=torch.bfloat16)},  # dimensions swapped
            {"key": torch.zeros(3, 2, 6, dtype=torch.int8)},  # not to be quantized twice
        ],
    )
    def test_writing_wrong_shapes_strides_and_dtypes(self, changes):
        _, k_cache, v_cache = make_cache()
        key = torch.zeros(3, 2, 6, dtype=torch.bfloat16)
        arguments = {"key": key, "value": key, "k_cache": k_cache, "v_cache": v_cache, "slots": torch.arange(3)}
        with pytest.raises(KernelError, match="write_kv takes key and value"):
            kernels.write_kv(**(arguments | changes))

    @pytest.mark.parametrize("slot", [-1, 32])
    def test_slots_outside_the_cache(self, slot):
        buffer, k_cache, v_cache = make_cache()
        key = torch.ones(2, 2, 6, dtype=torch.bfloat16)
        slots, fine = torch.tensor([0, slot]), torch.tensor([0, 1])
        for call in (
            lambda: kernels.write_kv(key, key, k_cache, v_cache, slots),
            lambda: kernels.gather_kv(k_cache, v_cache, slots),
            lambda: kernels.copy_slots(k_cache, v_cache, slots, fine),
            lambda: kernels.copy_slots(k_cache, v_cache, fine, slots),
        ):
            with pytest.raises(KernelError, match=rf"slot {slot} is not in \[0, 32\)"):
                call()
        assert not buffer.any()

    @pytest.mark.parametrize("pair", [[-1, 0], [3, 0], [0, -1], [0, 5]])
    def test_blocks_outside_the_pools(self, pair):
        src, dst = torch.ones(3, 64, dtype=torch.uint8), torch.zeros(5, 64, dtype=torch.uint8)
        with pytest.raises(KernelError, match=r"block -?\d is not in \[0, [35]\)"):
            kernels.copy_blocks(src, dst, torch.tensor([[0, 0], pair]))
        assert not dst.any()

    @pytest.mark.parametrize(
        ("src", "pairs"),
        [
            (torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int64)),
            (torch.zeros(3, 64), torch.zeros(1, 2, dtype=torch.int64)),
            (torch.zeros(3, 128, dtype=torch.uint8)[:, :64], torch.zeros(1, 2, dtype=torch.int64)),
            (torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int32)),
            (torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)),
        ],
    )
    def test_pools_and_pairs_of_the_wrong_kind(self, src, pairs):
        with pytest.raises(KernelError, match="copy_blocks takes contiguous uint8 pools"):
            kernels.copy_blocks(src, torch.zeros(5, 64, dtype=torch.uint8), pairs)
