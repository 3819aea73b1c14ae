"""Weights that another tool packed, patterns of module names, and LoRA adapters, as targets of reliability.fuzz."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache

import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import CheckpointError
from quire.config.checkpoint.name_patterns import NamePatterns
from quire.config.model import ModelConfig
from quire.config.quantization.compressed import CompressedScheme
from quire.config.quantization.integers import IntegerScheme
from quire.models.adapters.peft import read_adapter
from quire.models.base import Model
from quire.models.layers.stored.compressed import CompressedIntegers
from quire.models.layers.stored.gptq_awq import PackedIntegers
from quire.models.layers.stored.integers import StoredIntegers
from quire.models.layers.weighted_layer import Part
from quire.models.weights.loader import build_model, open_weights
from reliability.fuzz_target import JSON, Target, folder, refusal

_MAX_RANK = 4
_SHAPE = 16, 64
_SCALES = torch.float16
_GPTQ = IntegerScheme(4, 32, False, 1)
_STORED: tuple[StoredIntegers, ...] = (
    PackedIntegers(dataclasses.replace(_GPTQ, is_reordered=True), _SCALES, True),
    PackedIntegers(dataclasses.replace(_GPTQ, is_symmetric=True), _SCALES, True),
    PackedIntegers(dataclasses.replace(_GPTQ, bits=8, group_size=0), _SCALES, False),
    PackedIntegers(IntegerScheme(4, 32, True), _SCALES, False),
    CompressedIntegers(CompressedScheme("pack-quantized", 4, (1, 32), False, True), _SCALES, None, torch.int32, True),
    CompressedIntegers(CompressedScheme("int-quantized", 8, (1, 0)), _SCALES, None, None, False),
)


def packed(data: bytes) -> str:
    """Check that tensors of right shapes and any values are refused, or give the same numbers expanded and as the
    kernels keep them."""
    if not data:
        return "too short"
    stored = _STORED[data[0] % len(_STORED)]
    tensors, start = {}, 1
    for name, spec in stored.specs(Part(_SHAPE), torch.bfloat16).items():
        num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        content = data[start : start + num_bytes].ljust(num_bytes, b"\0")
        tensors[name] = torch.frombuffer(bytearray(content), dtype=spec.dtype).view(spec.shape)
        start += num_bytes
    expanded = torch.empty(_SHAPE, dtype=torch.bfloat16)
    try:
        stored.expand(expanded, tensors)
        matrix = stored.format((_SHAPE[0],)).matrix(tensors, _SHAPE, torch.bfloat16)
    except CheckpointError as error:
        return refusal(error, len(str(error)) < 500, "a short message")
    assert isinstance(matrix, kernels.QuantizedWeight)
    rows = kernels.embedding(torch.arange(_SHAPE[0]), matrix)
    assert torch.equal(rows if matrix.order is None else rows[:, matrix.order.argsort()], expanded)
    return ""


def _packed_corpus() -> list[bytes]:
    made = []
    for kind, stored in enumerate(_STORED):
        content = bytes([kind])
        for name, spec in stored.specs(Part(_SHAPE), torch.bfloat16).items():
            content += _good(name, spec.shape).to(spec.dtype).contiguous().view(torch.uint8).numpy().tobytes()
        made.append(content)
    return made


def _good(name: str, shape: tuple[int, ...]) -> Tensor:
    if "g_idx" in name:
        return torch.arange(_SHAPE[1]) // 32
    if "shape" in name:
        return torch.tensor(_SHAPE)
    if "scale" in name:
        return torch.linspace(0.01, 1, math.prod(shape)).view(shape)
    if "zero" in name:
        return torch.full(shape, 0x77777777)  # 8 in the first version of GPTQ
    return torch.arange(math.prod(shape)).view(shape) * 0x1234567 % 2**31


def patterns(data: bytes) -> str:
    """Check that a pattern is refused, or matches within its limit of work, also names on which `re` takes for ever."""
    try:
        found = NamePatterns(max_steps=100_000).compile("pattern", data.decode("utf-8", "replace"))
        for name in ("model.layers.10.self_attn.q_proj", "a" * 64, "lm_head"):
            found.starts(name)
            found.ends(name)
    except CheckpointError as error:
        return refusal(error, len(str(error)) < 500, "a short message")
    return ""


def _patterns_corpus() -> list[bytes]:
    return [
        rb".*self_attn.(q|k|v)_proj$", rb"^(?!.*lm_head).*", rb"(?:.*\.)+[0-9a-f]{1,3}\..*?", b"model.layers.0.mlp",
        rb"[^\d.]+|\w\b\s*", rb"((a?){2,9}|(b*)+)*\Z",
    ]  # fmt: skip


def adapter(data: bytes) -> str:
    """Check that an adapter with one corrupted file is refused, or has ranks within the limit and finite numbers."""
    if not data:
        return "too short"
    place, files = folder("adapter"), _adapter_files()
    for name, content in files.items():
        (place / name).write_bytes(content)
    (place / list(files)[data[0] % len(files)]).write_bytes(data[1:])
    try:
        found = read_adapter(place, _model(), _MAX_RANK)
    except CheckpointError as error:
        return refusal(error, len(str(error)) < 4000, "a short message")
    assert 0 < found.rank <= _MAX_RANK
    for module in found.modules.values():
        assert module.a.isfinite().all()
        assert module.b.isfinite().all()
    return ""


@cache
def _model() -> Model:
    config = dataclasses.replace(ModelConfig.resolve("quire-draft"), max_model_len=1)
    return build_model(config, open_weights(config))


@cache
def _adapter_files() -> dict[str, bytes]:
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "use_rslora": False,
                "rank_pattern": {"layers.1.*": 2}, "alpha_pattern": {}, "bias": "none"}  # fmt: skip
    shapes = {"A": (2, 96), "B": (96, 2)}
    header, data = {}, b""
    for factor, shape in shapes.items():
        name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight"
        content = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float16).numpy().tobytes()
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    weights = len(text).to_bytes(8, "little") + text + data
    return {"adapter_config.json": json.dumps(settings).encode(), "adapter_model.safetensors": weights}


def _adapter_corpus() -> list[bytes]:
    return [bytes([kind]) + content for kind, content in enumerate(_adapter_files().values())]


_PATTERN_WORDS = rb"( ) (?: (?= (?! (?<= (?P<n> | * + ? {2} {0,9} {99999} [ ] [^ \d \W \b ^ $ . \1 (?i) (?>".split()
TARGETS = {
    "packed": Target(packed, _packed_corpus, (b"\0" * 16, b"\xff" * 16, b"\x7f\x7c", b"\0\x7c", b"\xff\xff\xff\x7f")),
    "patterns": Target(patterns, _patterns_corpus, (*_PATTERN_WORDS, b"a", b"model.", b"\n", b"\xff")),
    "adapter": Target(adapter, _adapter_corpus, (*JSON, *b"lora_A lora_B F16 F32 shape data_offsets q_proj".split())),
}
"""Targets by name."""
