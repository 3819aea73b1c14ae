"""GPTQ and AWQ checkpoints: the integers of their words, with the values that their formulas give."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import kernels
from quire.cli import main
from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model, weight_bytes

from .small_checkpoint import SMALL

PROMPT = [5, 60, 3, 3, 17, 40, 8]


def words(integers: Tensor, bits: int) -> Tensor:
    """Integers [rows, columns] packed along the columns, the first into the lowest bits, as int32."""
    per_word = 32 // bits
    parts = integers.long().view(len(integers), -1, per_word) << (torch.arange(per_word) * bits)
    total = parts.sum(2)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def awq_words(integers: Tensor) -> Tensor:
    """AutoAWQ's order: the nibbles of a word are the columns 0, 2, 4, 6, 1, 3, 5, 7."""
    return words(integers.view(len(integers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)


def quantized(
    folder: Path, to: Path, stated: dict[str, Any], *, left_out: tuple[str, ...] = (), scales: Any = torch.float16
) -> Path:
    """Write a checkpoint with random integers in its projections, and beside it (`plain`) one of their values."""
    bits, group = stated["bits"], stated["group_size"]
    is_awq, v1 = stated["quant_method"] == "awq", stated.get("checkpoint_format", "gptq") == "gptq"
    generator = torch.Generator().manual_seed(bits + group)
    stored, plain = {}, {}
    orders: dict[int, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" not in name or any(part in name for part in left_out):
            stored[name] = plain[name] = weight
            continue
        (n, k), module = weight.shape, name.removesuffix(".weight")
        size = k if group == -1 else group
        groups = -(-k // size)
        integers = torch.randint(0, 2**bits, (k, n), generator=generator)
        is_middle = stated.get("sym", False) and not is_awq
        zeros = torch.full((groups, n), 2 ** (bits - 1))
        if not is_middle:
            zeros = torch.randint(1, 2**bits, (groups, n), generator=generator)
        scale = (torch.rand(groups, n, generator=generator) * 0.02 / 2 ** (bits - 4)).to(scales)
        g_idx = torch.arange(k) // size
        if stated.get("desc_act"):
            g_idx = g_idx[orders.setdefault(k, torch.randperm(k, generator=generator))]
        values = (integers - zeros[g_idx]) * scale.float()[g_idx]
        stored[f"{module}.scales"] = scale
        stored[f"{module}.qweight"] = awq_words(integers) if is_awq else words(integers.T, bits).T.contiguous()
        stored[f"{module}.qzeros"] = awq_words(zeros) if is_awq else words(zeros - int(v1), bits)
        if not is_awq:
            stored[f"{module}.g_idx"] = g_idx.int()
        plain[name] = values.T.contiguous()
    for target, tensors, section in ((to, stored, {"quantization_config": stated}), (to / "plain", plain, {})):
        target.mkdir()
        config = json.loads((folder / "config.json").read_text()) | section | {"dtype": "float32"}
        (target / "config.json").write_text(json.dumps(config))
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return to


def logits_of(config: ModelConfig, paged_run: Any) -> Tensor:
    logits: Tensor = paged_run(load_model(config), config, [PROMPT]).step([len(PROMPT)])[0]
    return logits


def rows_of(matrix: Any) -> Tensor:
    """All numbers of a matrix [n, k]."""
    if isinstance(matrix, kernels.StackedWeight):
        return torch.cat([rows_of(part) for part in matrix.parts])
    rows = kernels.embedding(torch.arange(matrix.n), matrix)
    order = getattr(matrix, "order", None)
    return rows if order is None else rows[:, order.argsort()]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
CASES: list[dict[str, Any]] = [
    GPTQ,
    GPTQ | {"sym": False, "group_size": 32},
    GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    GPTQ | {"group_size": -1, "bits": 8},
    GPTQ | {"bits": 8, "sym": False},
    GPTQ | {"desc_act": True},
    GPTQ | {"desc_act": True, "sym": False, "group_size": 32, "static_groups": True},
    {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    GPTQ | {"sym": False, "group_size": 96},  # the last group has 32 inputs
    GPTQ | {"desc_act": True, "group_size": 96, "bits": 8},
]


@pytest.mark.parametrize("stated", CASES, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
def test_every_weight_has_the_value_of_its_formula(
    stated: dict[str, Any], scales: torch.dtype, save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    config = ModelConfig.resolve(quantized(folder, tmp_path / "q", stated, scales=scales))
    plain = ModelConfig.resolve(tmp_path / "q" / "plain")
    model, expected = load_model(config), load_model(plain)
    num_quantized = num_bytes = 0
    for (name, layer), (_, other) in zip(model.weighted_layers(), expected.weighted_layers(), strict=True):
        matrix = getattr(layer, "weight", None)
        if isinstance(matrix, kernels.QuantizedWeight):
            assert torch.equal(rows_of(matrix), rows_of(other.weight)), name
            num_quantized += 1
            num_bytes += matrix.nbytes - other.weight.nbytes
    assert num_quantized == 8
    assert num_bytes == weight_bytes(config) - weight_bytes(plain)
    actual, exact = logits_of(config, paged_run), logits_of(plain, paged_run)
    assert 0 < (actual - exact).norm() <= 0.03 * exact.norm()


def test_modules_may_be_left_out_or_have_a_scheme_of_their_own(
    save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["v_proj", "layers.1.mlp"]}
    to = quantized(folder, tmp_path / "awq", awq, left_out=("v_proj", "layers.1.mlp"))
    exact = logits_of(ModelConfig.resolve(to / "plain"), paged_run)
    assert (logits_of(ModelConfig.resolve(to), paged_run) - exact).norm() <= 0.03 * exact.norm()
    dynamic = {"-:.*v_proj": {}, r".*\.down_proj": {"bits": 4, "group_size": 64}}
    to = quantized(folder, tmp_path / "gptq", GPTQ | {"dynamic": dynamic}, left_out=("v_proj",))
    config = ModelConfig.resolve(to)
    exact = logits_of(ModelConfig.resolve(to / "plain"), paged_run)
    assert (logits_of(config, paged_run) - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("method", ["awq", None])
def test_the_head_alone_becomes_int8_on_request(
    method: str | None, is_tied: bool, save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL, tie_word_embeddings=is_tied)
    to = folder if method is None else quantized(folder, tmp_path / "q", CASES[7])
    plain, config = (ModelConfig.resolve(to, head_quantization=each) for each in (None, "int8"))
    model, before = load_model(config), dict(load_model(plain).weighted_layers())
    saved, num_bytes = weight_bytes(plain) - weight_bytes(config), 0
    for name, layer in model.weighted_layers():
        matrix, old = (getattr(each, "table", getattr(each, "weight", None)) for each in (layer, before[name]))
        if isinstance(old, kernels.QuantizedWeight | kernels.PackedWeight):
            is_head = name == ("embed_tokens" if is_tied else "lm_head")
            assert getattr(matrix, "format", None) == ("int8" if is_head else getattr(old, "format", None)), name
            num_bytes += old.nbytes - matrix.nbytes
    assert num_bytes == saved > 0
    actual, exact = logits_of(config, paged_run), logits_of(plain, paged_run)
    assert 0 < (actual - exact).norm() <= 0.03 * exact.norm()
    with pytest.raises(ConfigError, match=r"head_quantization='int4'.* \(allowed: int8\)"):
        ModelConfig.resolve(to, head_quantization="int4")


@pytest.mark.skipif(kernels.isa() == "reference", reason="saved weights are in the native kernels' layout")
@pytest.mark.parametrize("stated", [CASES[6], CASES[7]], ids=["gptq", "awq"])
def test_weights_are_quantized_again_and_saved(
    stated: dict[str, Any], save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    to = quantized(folder, tmp_path / "q", stated)
    tensors = load_file(to / "model.safetensors")
    bias = {"model.layers.0.mlp.down_proj.bias": torch.arange(128.0)}  # AutoGPTQ adds some that the config lacks
    save_file(tensors | bias, to / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(ModelConfig.resolve(to, quantization="int8"), paged_run)
    unbiased = logits_of(ModelConfig.resolve(to / "plain", quantization="int8"), paged_run)
    assert (expected - unbiased).norm() > 0.1 * unbiased.norm()
    assert main(["quantize", str(to), str(tmp_path / "saved"), "--quantization", "int8"]) == 0
    assert torch.equal(logits_of(ModelConfig.resolve(tmp_path / "saved"), paged_run), expected)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bits": 3}, "weights of 3 bits; of this method Quire reads 4 and 8"),
        ({"group_size": 48}, "group_size is 48; Quire reads multiples of 32"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "8 bits; of this method Quire reads 4"),
        ({"pack_dtype": "int8"}, "pack_dtype"),
        ({"dynamic": {"-:(": {}}}, r"pattern '\('"),
        ({"dynamic": {"x": 1}}, "must be an object"),
        ({"dynamic": {r"+:(x)\1": {}}}, "back references, look-behind"),
        ({"dynamic": {"x" * 2001: {}}}, "2,000 characters"),
        ({"dynamic": [1]}, "dynamic must be an object"),
        ({"sym": 1}, "sym must be true or false"),
    ],
)
def test_what_is_not_read_is_refused_before_the_weights(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": GPTQ | change, "dtype": "float16"} | SMALL
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises((UnsupportedModelError, CheckpointError), match=told):
        ModelConfig.resolve(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "change", "told"),
    [
        ("g_idx", lambda old: old + 1, "g_idx must name each group"),
        ("g_idx", lambda old: torch.zeros_like(old), "g_idx must name each group"),
        ("qzeros", lambda old: old + 1, "not in the middle"),
        ("scales", lambda old: old[:1], r"wrong shape.*q_proj.scales \[1, 128\] instead of \[2, 128\]"),
        ("scales", lambda old: old * torch.nan, r"qkv_proj.*scales are not finite"),
        ("scales", lambda old: old.int(), "wrong dtype.*q_proj.scales int32"),
        ("qweight", lambda old: old.float(), "wrong dtype.*q_proj.qweight float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tensor: str, change: Any, told: str, save_checkpoint: Any, tmp_path: Path
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    path = quantized(folder, tmp_path / "q", GPTQ) / "model.safetensors"
    tensors = load_file(path)
    for module in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{module}.{tensor}"
        if tensor == "g_idx" or module == "q_proj":
            tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=told):
        load_model(ModelConfig.resolve(path.parent))


def test_an_order_that_the_config_states_must_be_there(save_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    path = quantized(folder, tmp_path / "q", GPTQ | {"desc_act": True}) / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.endswith("g_idx")}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"14 weight\(s\) missing: layers\.0\.self_attn\.q_proj\.g_idx"):
        load_model(ModelConfig.resolve(path.parent))


def test_projections_that_share_their_inputs_share_an_order(save_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    path = quantized(folder, tmp_path / "q", GPTQ) / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="differs between projections"):
        load_model(ModelConfig.resolve(path.parent))


def test_groups_of_awq_must_divide_the_inputs(save_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    to = quantized(folder, tmp_path / "q", CASES[8] | {"group_size": 96})
    with pytest.raises(CheckpointError, match="AWQ's group_size 96 does not divide the 128 inputs"):
        load_model(ModelConfig.resolve(to))


def test_words_must_be_full(save_checkpoint: Any, tmp_path: Path) -> None:
    fields = SMALL | {"hidden_size": 100, "num_attention_heads": 1, "num_key_value_heads": 1}
    path = save_checkpoint("LlamaForCausalLM", **fields)[0]
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj."
    tensors[f"{name}qweight"] = tensors.pop(f"{name}weight").int()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": GPTQ}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="100 integers do not fill words of 8"):
        load_model(ModelConfig.resolve(path))


def test_the_method_may_be_named_and_no_other(save_checkpoint: Any, tmp_path: Path) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    path = quantized(folder, tmp_path / "q", GPTQ)
    assert (
        ModelConfig.resolve(path).quantization == ModelConfig.resolve(path, quantization="gptq").quantization == "gptq"
    )
    with pytest.raises(ConfigError, match=r"quantization='awq': the weights .* are gptq already"):
        ModelConfig.resolve(path, quantization="awq")
    with pytest.raises(ConfigError, match="are not quantized by awq; int8 or int4 quantizes them"):
        ModelConfig.resolve(folder, quantization="awq")
