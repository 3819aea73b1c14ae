"""Mixtures of experts larger than memory: what stays in the file, what the plan says of it, and the same tokens."""

import ctypes
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, kernels
from quire.common.errors import CheckpointError, ConfigError, KernelError, OutOfMemoryError
from quire.config import machine
from quire.config.args import EngineArgs
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.machine import disk_speed
from quire.config.model import ModelConfig
from quire.kernels.experts.weights import ExpertFiles
from quire.models.weights.loader import load_model
from quire.models.weights.saving import save_quantized
from quire.runner.memory_plan import plan_memory
from tests.engine.test_batch_invariance import ROOMY, make_prompts, mixed_params, run

pytestmark = pytest.mark.skipif(kernels.isa() == "reference", reason="saved weights are in the native kernels' layout")

VOCAB, HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, LAYERS = 128, 64, 96, 8, 2, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K, "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
EXPERT_BYTES = kernels.quantized_bytes(2 * WIDTH, HIDDEN, "int4") + kernels.quantized_bytes(HIDDEN, WIDTH, "int4")
SIZES = {"max_model_len": 96, "max_num_seqs": 32, "max_num_batched_tokens": 64}


def plain_mixture(folder: Path) -> Path:
    """A checkpoint whose tokens differ enough that all experts are used."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        shapes |= {f"{prefix}{name}": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_norm": (16,) for name in "qk"}
        shapes |= {f"{prefix}self_attn.{name}_proj": (64, HIDDEN) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj": (32, HIDDEN) for name in "kv"}
        shapes |= {f"{prefix}mlp.gate": (NUM_EXPERTS, HIDDEN)}
        for expert in range(NUM_EXPERTS):
            shapes |= {f"{prefix}mlp.experts.{expert}.{name}_proj": (WIDTH, HIDDEN) for name in ("gate", "up")}
            shapes |= {f"{prefix}mlp.experts.{expert}.down_proj": (HIDDEN, WIDTH)}
    tensors = {
        f"model.{name}.weight": torch.randn(shape, generator=generator).bfloat16() / (4 if len(shape) == 2 else 1)
        for name, shape in shapes.items()
    }
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_mixture(tmp_path_factory.mktemp("mixture") / "plain")


@pytest.fixture(scope="module")
def saved(plain: Path) -> Path:
    folder = plain.parent / "int4"
    save_quantized(ModelConfig.resolve(plain, quantization="int4"), folder, lambda _: None)
    return folder


def args(folder: Path, **more: object) -> EngineArgs:
    return EngineArgs(model=str(folder), **(SIZES | more))


def test_experts_stay_in_the_file_where_the_weights_do_not_fit(saved: Path) -> None:
    whole = plan_memory(args(saved, kv_cache_memory="64KiB"))
    assert whole.in_file is None
    assert "experts" not in str(whole)
    short = whole.total_bytes - 1
    plan = plan_memory(args(saved, kv_cache_memory="64KiB", memory_limit=short))
    assert plan.in_file is not None
    assert plan.config.model.weights_from_file == "always"
    assert plan.in_file.num_bytes == LAYERS * NUM_EXPERTS * EXPERT_BYTES
    assert plan.in_file.token_bytes == LAYERS * TOP_K * EXPERT_BYTES
    assert plan.weight_bytes == whole.weight_bytes
    assert plan.resident_weight_bytes == whole.weight_bytes - plan.in_file.num_bytes
    assert plan.total_bytes == whole.total_bytes - plan.in_file.num_bytes
    assert plan.in_file.token_s == plan.in_file.token_bytes / plan.in_file.disk.bytes_per_s
    assert "of which the system can keep about" in str(plan)
    assert f"({'measured' if plan.in_file.disk.is_measured else 'assumed'})" in str(plan)
    stated = plan.to_dict()
    assert stated["resident_weight_bytes"] == plan.resident_weight_bytes
    assert stated["in_file"]["token_bytes"] == plan.in_file.token_bytes
    with pytest.raises(OutOfMemoryError, match="do not fit into the memory_limit"):
        plan_memory(args(saved, kv_cache_memory="64KiB", memory_limit=short, weights_from_file="never"))
    with pytest.raises(OutOfMemoryError, match="do not fit into the memory_limit"):
        plan_memory(args(saved, memory_limit=plan.resident_weight_bytes))


def test_experts_in_the_file_get_most_of_the_memory_that_is_left(saved: Path) -> None:
    given = {"weights_from_file": "always", "max_num_seqs": 256}
    least = plan_memory(args(saved, **given, kv_cache_memory="64KiB"))
    limit = least.total_bytes + 4 * 2**20
    left = limit - least.total_bytes + least.kv_cache.total_bytes
    cache = plan_memory(args(saved, **given, memory_limit=limit)).kv_cache.total_bytes
    assert left // 5 <= cache <= left // 4
    tight = limit - left + least.kv_cache.blocks_to_hold(96) * least.kv_cache.block_bytes
    assert plan_memory(args(saved, **given, memory_limit=tight)).max_model_len == 96, "one sequence has what it needs"


def test_where_nothing_can_stay_in_the_file_the_error_says_what_to_do(plain: Path) -> None:
    limit = plan_memory(args(plain)).weight_bytes
    for more in ({}, {"quantization": "int4", "memory_limit": limit // 8}):
        with pytest.raises(OutOfMemoryError, match=r"quire quantize .*plain FOLDER --quantization int4.*can stay"):
            plan_memory(args(plain, **({"memory_limit": limit} | more)))
    with pytest.raises(ConfigError, match=r"weights_from_file='always': .*`quire quantize .*plain FOLDER"):
        plan_memory(args(plain, weights_from_file="always"))
    with pytest.raises(ConfigError, match="weights_from_file='some'"):
        plan_memory(args(plain, weights_from_file="some"))
    with pytest.raises(OutOfMemoryError, match=r"quire quantize quire-tiny FOLDER.* its weights can stay in the file$"):
        plan_memory(EngineArgs(memory_limit="1MiB"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "int4"
    save_quantized(ModelConfig.resolve("quire-tiny", quantization="int4"), folder, lambda _: None)
    return folder


def test_all_matrices_of_a_dense_model_stay_in_the_file_where_they_do_not_fit(dense: Path) -> None:
    whole = plan_memory(args(dense, kv_cache_memory="1MiB"))
    assert whole.in_file is None
    plan = plan_memory(args(dense, kv_cache_memory="1MiB", memory_limit=whole.total_bytes - 1))
    assert plan.in_file is not None
    assert plan.in_file.token_bytes == plan.in_file.num_bytes > whole.weight_bytes // 2
    assert plan.total_bytes == whole.total_bytes - plan.in_file.num_bytes
    assert "from file   " in str(plan)
    assert "of weights, at worst all from the disk" in str(plan)
    never = args(dense, kv_cache_memory="1MiB", memory_limit=whole.total_bytes - 1, weights_from_file="never")
    with pytest.raises(OutOfMemoryError, match="do not fit into the memory_limit"):
        plan_memory(never)


def test_a_dense_model_in_the_file_gives_the_same_tokens(dense: Path) -> None:
    prompts, params = make_prompts(6, VOCAB, 40), mixed_params(6)
    given = {"model": str(dense), "num_gpu_blocks_override": ROOMY, "max_model_len": 96, "tokenizer": "quire-tiny"}
    copied, in_file = (LLM(**given, weights_from_file=choice) for choice in ("never", "always"))
    assert run(in_file, prompts, params) == run(copied, prompts, params)
    model = load_model(ModelConfig.resolve(dense, weights_from_file="always"))
    weight = model.get_submodule("layers.1.self_attn.o_proj").weight
    assert isinstance(weight, kernels.QuantizedWeight)
    assert is_of(dense / "model.safetensors", weight.address)


def test_a_request_alone_or_among_32_gets_the_same_tokens_wherever_experts_are(saved: Path) -> None:
    prompts, params = make_prompts(32, VOCAB, 40), mixed_params(32)
    given = {
        "model": str(saved),
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": ROOMY,
        "max_model_len": 96,
        "tokenizer": "quire-tiny",
    }
    alone = LLM(**given, max_num_seqs=1, weights_from_file="never", num_threads=1)
    expected = [run(alone, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert len({tuple(tokens) for (tokens,) in expected}) > 24, "outputs too alike to tell requests apart"
    for weights_from_file, num_threads in (("auto", 2), ("always", 1), ("always", 3)):
        llm = LLM(**given, num_threads=num_threads, weights_from_file=weights_from_file)
        assert run(llm, prompts, params) == expected, (weights_from_file, num_threads)


def test_each_placement_is_what_it_says(saved: Path) -> None:
    def matrices(weights_from_file: str) -> tuple[kernels.QuantizedWeight, kernels.QuantizedWeight]:
        model = load_model(ModelConfig.resolve(saved, weights_from_file=weights_from_file))
        names = ("layers.1.mlp.experts.3.down_proj", "layers.1.self_attn.o_proj")
        expert, other = (model.get_submodule(name).weight for name in names)
        assert isinstance(expert, kernels.QuantizedWeight)
        assert isinstance(other, kernels.QuantizedWeight)
        return expert, other

    found = {choice: matrices(choice) for choice in ("auto", "always", "never")}
    assert [expert.in_file for expert, _ in found.values()] == [False, True, False]
    assert not any(other.in_file for _, other in found.values())
    of_file = [[is_of(saved / "model.safetensors", each.address) for each in pair] for pair in found.values()]
    assert of_file == [[True, True], [True, False], [False, False]]
    for expert, other in found.values():
        assert torch.equal(expert.data, found["auto"][0].data)
        assert torch.equal(other.data, found["auto"][1].data)


def is_of(path: Path, address: int) -> bool:
    """Whether an address is of a mapped file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith(str(path))
    return False


def test_a_file_that_is_cut_after_its_header_was_read_is_refused(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((saved / "model.safetensors").read_bytes())
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    name = next(iter(checkpoint.tensors))
    with (
        pytest.raises(CheckpointError, match=r"was cut to .* bytes after its header was read"),
        checkpoint.reading(name),
    ):
        pass


def test_a_file_larger_than_all_memory_is_mapped(tmp_path: Path) -> None:
    size = 2**42
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError:
            pytest.skip("the file system has no files of 4 TiB")
    with open_checkpoint(tmp_path).reading("x", (size - 5, size)) as data:
        assert bytes(data) == bytes(5)


@pytest.fixture
def uncached(tmp_path: Path) -> tuple[np.ndarray, Callable[[], np.ndarray]]:
    """A mapped file that is not in memory, and a function that says which of its pages are."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 16 * 64)
    data = np.memmap(path, np.uint8, "c")  # torch takes no other
    resident = ctypes.CDLL(None).mincore

    def pages() -> np.ndarray:
        found = np.zeros(64, np.uint8)
        given = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data)), found.ctypes.data_as(ctypes.c_void_p)
        assert resident(*given) == 0
        return found & 1

    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages().any():
        pytest.skip("the file system keeps all files in memory")
    return data, pages


def test_the_experts_of_a_step_are_read_ahead(uncached: tuple[np.ndarray, Callable[[], np.ndarray]]) -> None:
    data, pages = uncached
    tensor = torch.from_numpy(np.asarray(data))
    parts = [tensor[start : start + 4096 * 5] for start in (100, 4096 * 32)]
    matrices = [[kernels.QuantizedWeight(1, 1, torch.float32, "int4", part, part.data_ptr())] for part in parts]
    files = ExpertFiles(matrices)
    kernels.read_ahead(files, kernels.group_by_expert(torch.zeros(0, 1, dtype=torch.int32), 2))
    assert not pages().any(), "no token, no expert"
    kernels.read_ahead(files, kernels.group_by_expert(torch.tensor([[1]], dtype=torch.int32), 2))
    deadline = time.monotonic() + 30
    while not pages()[32:37].all():  # the system reads them, and nothing waits for it
        assert time.monotonic() < deadline
    assert not pages()[:6].any(), "no token of the first expert"
    with pytest.raises(KernelError, match="rows grouped for 2 experts"):
        kernels.read_ahead(files, kernels.group_by_expert(torch.tensor([[1]], dtype=torch.int32), 3))


def test_the_speed_of_a_disk_is_measured_or_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    assert disk_speed(path) == machine.DiskSpeed(1e9, is_measured=False), "smaller than a piece"
    path.write_bytes(bytes(3 * 2**20 + 5))
    speed = disk_speed(path)
    assert speed.is_measured or speed.bytes_per_s == 1e9
    pieces: list[int] = []

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        pieces.append(offset)
        return len(buffers[0])

    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(machine.time, "perf_counter", iter([0.0, 0.05, 0.2, 0.5]).__next__)
    assert disk_speed(path) == machine.DiskSpeed(2 * 2**20 / 0.5, is_measured=True)
    assert pieces == [0, 2**20]

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: 0.0)
    assert disk_speed(path) == machine.DiskSpeed(1e9, is_measured=False)
