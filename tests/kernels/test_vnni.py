"""Variants with VNNI differ from those without it in products of bytes alone, which are exact: all bits are equal."""

import pytest
import torch

from quire import kernels
from tests.kernels.isas import ISAS, using
from tests.kernels.paged import Heads, attend_alone, make_stream, same_bits

PAIRS = [pair for pair in (("avx2", "avx_vnni"), ("avx512", "avx512_vnni")) if set(pair) <= set(ISAS)]
pytestmark = pytest.mark.skipif(not PAIRS, reason="this CPU has no VNNI, or the native extension is not in use")


@pytest.mark.parametrize(("plain", "vnni"), PAIRS)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits(plain, vnni, dtype, cache_dtype):
    heads = Heads(6, 2, 64, dtype, cache_dtype)
    stream = make_stream(heads, 300, seed=1)
    found = []
    for isa in (plain, vnni):
        with using(isa):
            found.append(attend_alone(heads, stream))
    assert same_bits(*found)


@pytest.mark.parametrize(("plain", "vnni"), PAIRS)
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 40])
@pytest.mark.parametrize("format", ["bfloat16", *kernels.QUANTIZED_FORMATS])
def test_products_have_the_same_bits(plain, vnni, format, rows):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 416), torch.randn(70, 416)
    found = []
    for isa in (plain, vnni):
        with using(isa):
            packed = weight.bfloat16()
            packed = kernels.pack_weight(packed) if format == "bfloat16" else kernels.quantize_weight(packed, format)
            found.append(kernels.matmul(x.bfloat16(), packed))
    assert same_bits(*found)
