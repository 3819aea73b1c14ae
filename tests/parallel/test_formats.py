"""Every format of weights: what a rank keeps of a matrix gives the bits of the same columns of the whole one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.cli import main
from quire.config.model import ModelConfig
from quire.config.parallel import Shard
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import Projection
from quire.models.weights.loader import load_model, weight_bytes
from quire.models.weights.usage import weight_use
from tests.kernels.isas import needs_native
from tests.models import test_compressed_tensors as compressed
from tests.models import test_gguf as gguf
from tests.models import test_packed_integers as packed
from tests.models.gguf_convert import convert
from tests.models.small_checkpoint import SMALL
from tests.models.variants import VARIANTS

pytestmark = needs_native
SMAPS = Path("/proc/self/smaps")


def check(config: ModelConfig, *, is_tiny: bool = False) -> None:
    """Of each matrix in each of two to four ranks; and these keep about what one process does, unless most is the
    padding of last panels."""
    whole = load_model(config)
    for num_ranks in (2, 3, 4):
        kept = 0
        for rank in range(num_ranks):
            ranks = kernels.Ranks(Shard(rank, num_ranks))
            kept += weight_use(config, ranks).num_bytes
            part = load_model(config, ranks)
            for (name, own), (_, other) in zip(part.weighted_layers(), whole.weighted_layers(), strict=True):
                if isinstance(own, Projection) and hasattr(own, "weight"):
                    check_projection(name, own, other)
                elif isinstance(own, Embedding) and own.kept is not None:
                    wanted = torch.arange(*own.kept[0])
                    rows = kernels.embedding(torch.arange(len(wanted)), own.table)
                    assert torch.equal(rows, kernels.embedding(wanted, other.table)), name
        assert is_tiny or kept < 1.7 * weight_bytes(config)  # norms and tables are in each


def check_projection(name: str, own: Projection, whole: Any) -> None:
    assert own.kept is not None, name
    x = torch.randn(3, own.shape[1], generator=torch.Generator().manual_seed(1)).to(own.dtype)
    expected = kernels.matmul(x, whole.weight, whole.bias)
    columns = torch.cat([torch.arange(*each) for each in own.kept])
    assert torch.equal(kernels.matmul(x, own.weight, own.bias), expected[:, columns]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_matrices_quantized_while_loading(quantization: str | None, dtype: str, save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("Qwen2ForCausalLM", **SMALL, tie_word_embeddings=dtype == "float32")
    check(ModelConfig.resolve(folder, quantization=quantization, dtype=dtype))


@pytest.mark.parametrize("name", ["phi3", "gpt-neox", "gpt2", "bloom", "falcon-40b", "starcoder2", "mixtral"])
def test_matrices_that_are_stacked_transposed_or_interleaved(name: str, save_checkpoint: Any) -> None:
    architecture, fields = VARIANTS[name]
    folder, _ = save_checkpoint(architecture, **fields)
    check(ModelConfig.resolve(folder, quantization="int8"), is_tiny=True)
    check(ModelConfig.resolve(folder, quantization="int4"), is_tiny=True)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_saved_folder(quantization: str, llama: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(llama), str(tmp_path / "saved"), "--quantization", quantization]) == 0
    check(ModelConfig.resolve(tmp_path / "saved"))


@pytest.mark.parametrize("stated", packed.CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_words_of_gptq_and_awq(stated: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    check(ModelConfig.resolve(packed.quantized(llama, tmp_path / "q", stated)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("module", "scales"), compressed.PACKED + compressed.FLOATS, ids=compressed.name_of)
def test_compressed_tensors(module: Any, scales: torch.dtype, llama: Path, tmp_path: Path) -> None:
    stated = compressed.section(module)
    check(compressed.quantized(tmp_path, llama, stated, lambda _, n: compressed.compressed(module, n, scales))[0])


@pytest.mark.parametrize("name", compressed.METHODS)
def test_other_floats(name: str, llama: Path, tmp_path: Path) -> None:
    stated, make, _ = compressed.METHODS[name]
    check(compressed.quantized(tmp_path, llama, stated, make)[0])


@pytest.mark.parametrize("kinds", [None, gguf.by_part])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_gguf_files(kinds: Callable[..., Any] | None, quantization: str | None, llama: Path, tmp_path: Path) -> None:
    path = convert(llama, tmp_path / "m.gguf", *([] if kinds is None else [kinds]))
    check(ModelConfig.resolve(path, quantization=quantization))


@pytest.mark.skipif(not SMAPS.exists(), reason="this system does not say which memory is in huge pages")
@pytest.mark.parametrize("format", [None, "int8"])
def test_the_rows_of_a_rank_lie_in_huge_pages_where_there_are_some(format: str | None) -> None:
    weight = torch.ones(40_000, 512)
    whole = kernels.pack_weight(weight) if format is None else kernels.quantize_weight(weight, format)
    part = kernels.take_rows(whole, [(100, 40_000)])
    assert not isinstance(part, kernels.StackedWeight)
    middle, flags = part.address + part.data.nbytes // 2, ""
    for line in SMAPS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(each, 16) for each in first.split("-"))
        elif first == "VmFlags:" and start <= middle < end:
            flags = rest
    assert "hg" in flags.split()
