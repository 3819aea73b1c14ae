"""Checkpoints of compressed-tensors, block FP8 and MXFP4: every weight has the value that the tools' own code gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire import kernels
from quire.cli import main
from quire.config.args import EngineArgs
from quire.config.model import ModelConfig
from quire.kernels.backends import reference
from quire.models.weights.loader import load_model, weight_bytes
from quire.runner.memory_plan import plan_memory

from .encoders import MODERN
from .test_packed_integers import PROMPT, logits_of, rows_of

ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FLOAT_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def group(format: str, *, inputs: Any = None, targets: Any = ("Linear",), **weights: Any) -> dict[str, Any]:
    """An entry of config_groups."""
    return {"format": format, "targets": list(targets), "weights": weights, "input_activations": inputs}


def section(*groups: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A `quantization_config`."""
    format = groups[0]["format"] if groups else "pack-quantized"
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": named, "ignore": ["lm_head"], "kv_cache_scheme": None, **values,
    }  # fmt: skip


def grid(weights: dict[str, Any], n: int, k: int) -> tuple[int, ...]:
    """The shape of the scales."""
    rows, columns = weights.get("block_structure") or (1, weights.get("group_size"))
    many = (-(-n // rows), k // columns if columns and "block_structure" not in weights else -(-k // (columns or k)))
    return {"tensor": (1,), "channel": (n, 1)}.get(weights["strategy"], many)


def compressed(module: dict[str, Any], shape: tuple[int, int], scales: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """A random matrix as the library stores it, and as the library decompresses it, with the scales in float32."""
    scheme, weights = QuantizationScheme(**module), module["weights"]
    compressor = BaseCompressor.get_value_from_registry(module["format"])
    low, high = (-8, 7) if weights["num_bits"] == 4 else (-128, 127)
    scale = (torch.rand(grid(weights, *shape)) * 0.02 / (high + 1) * 8 + 1e-4).to(scales)
    if module["format"].startswith("mxfp4"):
        scale = torch.exp2(torch.randint(-9, -5, scale.shape)).to(scales)
    state = {"weight": torch.randn(shape) * 0.02, "weight_scale": scale}
    if not weights.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(low, high, scale.shape).to(torch.int8)
    stored = dict(compressor.compress(state, scheme))
    exact = dict(stored)
    if not module["format"].startswith("mxfp4"):
        exact["weight_scale"] = exact["weight_scale"].float()
    return stored, compressor.decompress(exact, scheme)["weight"].float()


def write(folder: Path, tensors: dict[str, Tensor], like: Path, quantization: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((like / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantization} if quantization else {}))
    )
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantized(to: Path, like: Path, stated: dict[str, Any], make: Any) -> tuple[ModelConfig, ModelConfig]:
    """A checkpoint whose projections are those that `make(name, shape)` returns, and one of plain numbers."""
    torch.manual_seed(0)
    stored, plain = {}, {}
    for name, weight in load_file(like / "model.safetensors").items():
        made = make(name, weight.shape) if "_proj" in name or ".W" in name else None
        if made is None:
            stored[name] = plain[name] = weight
        else:
            module = name.removesuffix("weight")
            stored |= {module + own: tensor for own, tensor in made[0].items()}
            plain[name] = made[1]
    theirs, ours = write(to / "q", stored, like, stated), write(to / "plain", plain, like, None)
    return ModelConfig.resolve(theirs), ModelConfig.resolve(ours)


def check(config: ModelConfig, plain: ModelConfig, paged_run: Any, *, tolerance: float) -> None:
    """All weights equal, the plan is exact, and the logits are those that transformers computes in float32."""
    model, expected = load_model(config), load_model(plain)
    difference = 0
    for (name, layer), (_, other) in zip(model.weighted_layers(), expected.weighted_layers(), strict=True):
        if "_proj" in name:
            matrix = layer.weight
            assert torch.equal(rows_of(matrix), rows_of(other.weight)), name
            difference += matrix.nbytes - other.weight.nbytes
    assert difference == weight_bytes(config) - weight_bytes(plain)
    plan = plan_memory(EngineArgs(model=str(config.path), num_gpu_blocks_override=8, max_model_len=32))
    assert plan.weight_bytes == weight_bytes(config)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(plain.path)
    with torch.no_grad():
        exact = oracle(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(config, paged_run) - exact).norm() <= tolerance * exact.norm()


HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
PACKED: list[tuple[dict[str, Any], torch.dtype]] = [
    (group("pack-quantized", num_bits=4, strategy="group", group_size=32), FLOAT),
    (group("pack-quantized", num_bits=4, strategy="group", group_size=64, actorder="weight"), BFLOAT),
    (group("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False), BFLOAT),
    (group("pack-quantized", num_bits=4, strategy="channel", symmetric=False), HALF),
    (group("pack-quantized", num_bits=4, strategy="channel", inputs=ACTIVATIONS), FLOAT),
    (group("pack-quantized", num_bits=4, strategy="tensor"), FLOAT),
    (group("pack-quantized", num_bits=4, strategy="tensor", symmetric=False), HALF),
    (group("pack-quantized", num_bits=8, strategy="group", group_size=64), HALF),
    (group("pack-quantized", num_bits=8, strategy="channel", symmetric=False), HALF),
    (group("int-quantized", num_bits=8, strategy="channel", inputs=ACTIVATIONS), FLOAT),
    (group("int-quantized", num_bits=8, strategy="channel", inputs=ACTIVATIONS, symmetric=False), BFLOAT),
    (group("int-quantized", num_bits=8, strategy="tensor", inputs=ACTIVATIONS), FLOAT),
    (group("int-quantized", num_bits=8, strategy="tensor", symmetric=False), BFLOAT),
    (group("int-quantized", num_bits=8, strategy="group", group_size=32), HALF),
    (group("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), BFLOAT),
]
FLOATS: list[tuple[dict[str, Any], torch.dtype]] = [
    (group("float-quantized", num_bits=8, type="float", strategy="channel", inputs=FLOAT_ACTIVATIONS), FLOAT),
    (group("float-quantized", num_bits=8, type="float", strategy="channel"), BFLOAT),
    (group("float-quantized", num_bits=8, type="float", strategy="tensor"), FLOAT),
    (group("float-quantized", num_bits=8, type="float", strategy="group", group_size=16), FLOAT),
    (group("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]), FLOAT),
    (group("naive-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 20]), FLOAT),
    (group("naive-quantized", num_bits=8, type="int", strategy="channel"), FLOAT),
]


def name_of(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    weights = "-".join(str(v) for v in value["weights"].values())
    return f"{value['format']}-{weights}{'-dynamic' if value['input_activations'] else ''}"


@pytest.mark.parametrize(("module", "scales"), PACKED + FLOATS, ids=name_of)
def test_every_weight_is_that_of_the_library(
    module: dict[str, Any], scales: torch.dtype, llama: Path, paged_run: Any, tmp_path: Path
) -> None:
    config, plain = quantized(tmp_path, llama, section(module), lambda _, shape: compressed(module, shape, scales))
    is_float = (module, scales) in FLOATS[:-1]
    check(config, plain, paged_run, tolerance=1e-5 if is_float else 0.03)
    assert (config.quantization, config.quant_method) == ("compressed-tensors", "compressed-tensors")
    kinds = {type(layer.weight) for name, layer in load_model(config).weighted_layers() if "_proj" in name}
    assert kinds == {kernels.PackedWeight if is_float else kernels.QuantizedWeight}


@pytest.mark.parametrize("scales", [FLOAT, BFLOAT])
def test_in_bfloat16_the_product_is_rounded_once(scales: torch.dtype, llama: Path, tmp_path: Path) -> None:
    module, _ = FLOATS[0]
    config, _ = quantized(tmp_path, llama, section(module), lambda _, shape: compressed(module, shape, scales))
    stored = load_file(config.path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj."
    library = BaseCompressor.get_value_from_registry("float-quantized")
    state = {own: stored[name + own] for own in ("weight", "weight_scale")}
    expected = library.decompress(state, QuantizationScheme(**module))["weight"].bfloat16()
    model = load_model(ModelConfig.resolve(config.path, dtype="bfloat16"))
    assert torch.equal(rows_of(model.get_submodule("layers.0.mlp.down_proj").weight), expected)


def test_inputs_of_a_group_need_not_be_neighbours(llama: Path, paged_run: Any, tmp_path: Path) -> None:
    """`actorder` group: what the library wrote until 2026, with a group for each input."""
    module = group("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False, actorder="group")
    plainly = group("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False)
    orders: dict[int, Tensor] = {}

    def make(_: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        stored, weight = compressed(plainly, shape, BFLOAT)
        order = orders.setdefault(shape[1], torch.randperm(shape[1]))
        packed = stored["weight_packed"].view(torch.uint8)
        halves = torch.stack([packed & 15, packed >> 4], 2).flatten(1)[:, order]
        stored["weight_packed"] = (halves[:, ::2] | halves[:, 1::2] << 4).view(torch.int32)
        stored["weight_g_idx"] = (order // 64).int()
        return stored, weight[:, order]

    config, plain = quantized(tmp_path, llama, section(module), make)
    check(config, plain, paged_run, tolerance=0.03)
    again = load_model(ModelConfig.resolve(config.path, quantization="int8"))
    expected = load_model(ModelConfig.resolve(plain.path, quantization="int8"))
    for name in ("layers.0.self_attn.qkv_proj", "layers.1.mlp.down_proj"):
        assert torch.equal(rows_of(again.get_submodule(name).weight), rows_of(expected.get_submodule(name).weight))


def test_groups_of_modules_may_have_schemes_of_their_own(llama: Path, paged_run: Any, tmp_path: Path) -> None:
    values = group("int-quantized", targets=["re:.*v_proj$"], num_bits=8, strategy="channel", inputs=ACTIVATIONS)
    down = group("float-quantized", targets=["model.layers.1.mlp.down_proj"], num_bits=8, type="float",
                 strategy="tensor")  # fmt: skip
    others = group("pack-quantized", num_bits=4, strategy="group", group_size=32)
    ignored = ["lm_head", "re:.*o_proj", "model.layers.0.self_attn.k_proj"]

    def make(name: str, shape: tuple[int, int]) -> Any:
        if "o_proj" in name or "layers.0.self_attn.k_proj" in name:
            return None
        chosen = values if "v_proj" in name else down if "layers.1.mlp.down" in name else others
        return compressed(chosen, shape, FLOAT)

    stated = section(others, down, values, format="mixed-precision", ignore=ignored)
    config, plain = quantized(tmp_path, llama, stated, make)
    check(config, plain, paged_run, tolerance=0.03)
    model = load_model(config)
    fused = model.get_submodule("layers.0.self_attn.qkv_proj").weight
    assert isinstance(fused, kernels.StackedWeight)
    assert [type(part).__name__ for part in fused.parts] == ["QuantizedWeight", "PackedWeight", "QuantizedWeight"]


def block_fp8(
    name: str, shape: tuple[int, int], block: tuple[int, int] = (128, 128)
) -> tuple[dict[str, Tensor], Tensor]:
    """As DeepSeek stores it: the definition is the product of each number with its block's scale."""
    scales = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) * 1e-3
    weight = (torch.randn(shape) * 40).to(torch.float8_e4m3fn)
    spread = scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
    return {"weight": weight, "weight_scale_inv": scales}, weight.float() * spread


def tensor_fp8(scale_shape: tuple[int, ...], *, is_static: bool) -> Any:
    def make(name: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        weight, scale = (torch.randn(shape) * 40).to(torch.float8_e4m3fn), torch.full(scale_shape, 3e-4)
        inputs = {"input_scale": torch.full(scale_shape, 0.1, dtype=BFLOAT)} if is_static else {}
        return {"weight": weight, "weight_scale": scale, **inputs}, weight.float() * scale

    return make


def mxfp4(name: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    blocks = torch.randint(0, 256, (shape[0], shape[1] // 32, 16), dtype=torch.uint8)
    scales = torch.randint(115, 121, (shape[0], shape[1] // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    return {"weight_blocks": blocks, "weight_scales": scales}, expected


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
METHODS: dict[str, tuple[dict[str, Any], Any, float]] = {
    "DeepSeek's blocks": (FP8 | {"weight_block_size": [128, 128]}, block_fp8, 1e-5),
    "a scale for each tensor": (FP8, tensor_fp8((1,), is_static=False), 1e-5),
    "static, as AutoFP8": (FP8 | {"activation_scheme": "static"}, tensor_fp8((), is_static=True), 1e-5),
    "gpt-oss's MXFP4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4, 0.03),
}


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_of_floats(name: str, llama: Path, paged_run: Any, tmp_path: Path) -> None:
    stated, make, tolerance = METHODS[name]
    left_out = lambda name, shape: None if "layers.1.mlp" in name else make(name, shape)  # noqa: E731
    config, plain = quantized(tmp_path, llama, stated, left_out)
    check(config, plain, paged_run, tolerance=tolerance)
    assert config.quantization == stated["quant_method"]


def test_mxfp4_is_multiplied_by_as_it_is(llama: Path, tmp_path: Path) -> None:
    stated, make, _ = METHODS["gpt-oss's MXFP4"]
    config, _ = quantized(tmp_path, llama, stated, make)
    matrix = load_model(config).get_submodule("layers.0.mlp.down_proj").weight
    stored = load_file(config.path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_"
    blocks = stored[f"{name}blocks"].flatten(1)
    halves = torch.stack([blocks & 15, blocks >> 4], 2).flatten(1)
    check_product(matrix, reference.split_integers(halves, stored[f"{name}scales"], None, 4, 32))
    assert matrix.format == "mxfp4"


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_integers_are_multiplied_by_as_they_are(is_symmetric: bool, llama: Path, tmp_path: Path) -> None:
    module = group("int-quantized", num_bits=8, strategy="channel", inputs=ACTIVATIONS, symmetric=is_symmetric)
    config, _ = quantized(tmp_path, llama, section(module), lambda _, shape: compressed(module, shape, BFLOAT))
    matrix = load_model(config).get_submodule("layers.1.mlp.down_proj").weight
    stored = load_file(config.path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    zeros = None if is_symmetric else (stored[f"{name}_zero_point"].int() + 128).to(torch.uint8)
    integers = (stored[name].int() + 128).to(torch.uint8)
    check_product(matrix, reference.split_integers(integers, stored[f"{name}_scale"], zeros, 8, 192))
    assert int(stored[name].min()) == -128


def check_product(matrix: Any, split: tuple[Tensor, Tensor, Tensor | None]) -> None:
    x = torch.randn(5, matrix.k)
    padded = torch.nn.functional.pad(x, (0, split[0].shape[1] * 32 - matrix.k))
    assert torch.equal(kernels.matmul(x, matrix, None), reference.quantized_matmul(padded, *split, None, torch.float32))


def test_an_encoder_whose_projections_are_stacked_reads_every_weight(tmp_path: Path) -> None:
    fields = MODERN | {"hidden_size": 64, "intermediate_size": 96}
    transformers.ModernBertModel(transformers.ModernBertConfig(**fields)).save_pretrained(tmp_path)
    module, scales = PACKED[0]
    config, plain = quantized(tmp_path, tmp_path, section(module), lambda _, shape: compressed(module, shape, scales))
    pairs = zip(load_model(config).weighted_layers(), load_model(plain).weighted_layers(), strict=True)
    stacked = [(layer, other) for (name, layer), (_, other) in pairs if name.endswith(("qkv_proj", "gate_up_proj"))]
    assert len(stacked) == 8
    for layer, other in stacked:
        assert isinstance(layer.weight, kernels.QuantizedWeight)
        assert torch.equal(rows_of(layer.weight), rows_of(other.weight))


AGAIN: dict[str, tuple[dict[str, Any], Any]] = {
    "compressed-tensors": (section(PACKED[2][0]), lambda _, shape: compressed(PACKED[2][0], shape, BFLOAT)),
    "fp8": METHODS["DeepSeek's blocks"][:2],
    "mxfp4": METHODS["gpt-oss's MXFP4"][:2],
}


@pytest.mark.skipif(kernels.isa() == "reference", reason="saved weights are in the native kernels' layout")
@pytest.mark.parametrize("method", AGAIN)
def test_weights_are_quantized_again_and_saved(method: str, llama: Path, paged_run: Any, tmp_path: Path) -> None:
    config, plain = quantized(tmp_path, llama, *AGAIN[method])
    expected = logits_of(ModelConfig.resolve(plain.path, quantization="int4"), paged_run)
    assert torch.equal(logits_of(ModelConfig.resolve(config.path, quantization="int4"), paged_run), expected)
    assert main(["quantize", str(config.path), str(tmp_path / "saved")]) == 0
    saved = ModelConfig.resolve(tmp_path / "saved")
    assert (saved.quantization, saved.quant_method) == ("int4", "quire")
    assert torch.equal(logits_of(saved, paged_run), expected)
