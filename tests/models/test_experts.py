"""Layers of experts: what a plain loop computes, from checkpoints of every format and arrangement of tensors."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire import kernels
from quire.common.errors import CheckpointError
from quire.config.checkpoint.safetensors import open_safetensors
from quire.config.checkpoint.tensors import MappedCheckpoint
from quire.config.model import ModelConfig
from quire.kernels import Routing
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.experts import Experts, ExpertsShape
from quire.models.weights.loader import load_model, weight_bytes
from quire.models.weights.saving import save_quantized
from quire.models.weights.stacked import Stack, UnstackedCheckpoint

from . import test_compressed_tensors as compressed
from . import test_packed_integers as packed
from .gguf_convert import Kind, convert
from .small_checkpoint import SMALL

MIXTURE = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "head_dim": 32}
"""Every token goes to all experts: which of them are the best must not depend on how weights are rounded."""
WIDTH, HIDDEN, NUM_EXPERTS = 24, 32, 5
NO_BATCH: BatchTensors = None  # type: ignore[assignment]


@pytest.fixture
def mixture(save_checkpoint: Any) -> Path:
    return save_checkpoint("Qwen3MoeForCausalLM", **MIXTURE)[0]


def test_one_missing_matrix_of_an_expert_is_named_before_weights_are_read(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(mixture / "model.safetensors")
    missing = next(name for name in tensors if re.search(r"layers\.1\..*experts\.2\.down_proj", name))
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, mixture / "model.safetensors")
    monkeypatch.setattr(MappedCheckpoint, "reading", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(CheckpointError, match=re.escape(missing.removeprefix("model."))) as caught:
        load_model(ModelConfig.resolve(mixture))
    assert "\n" not in str(caught.value)


def logits_of(folder: Path, paged_run: Any) -> torch.Tensor:
    return packed.logits_of(ModelConfig.resolve(folder), paged_run)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


class Shared(torch.nn.Module):
    """In the place of a shared MLP."""

    def forward(self, x: torch.Tensor, batch: BatchTensors) -> torch.Tensor:
        return x.flip(1).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_layer_is_the_weighted_sum_of_its_experts(dtype: torch.dtype, is_shared: bool) -> None:
    torch.manual_seed(0)
    routing = Routing(2, NUM_EXPERTS, "sigmoid", is_normalized=True, scale=1.5)
    shape = ExpertsShape(routing, WIDTH, "gelu", bias=True, router_bias=True, correction_shape=(1, NUM_EXPERTS),
                         shared_width=HIDDEN if is_shared else None, shared_gate=is_shared)  # fmt: skip
    layer = Experts(shape, HIDDEN, dtype, Shared() if is_shared else None)
    given = {}
    for name, module in layer.named_modules():
        if hasattr(module, "set_weights"):
            given[name] = {own: torch.randn(s.shape).to(s.dtype) for own, s in module.weight_specs().items()}
            module.set_weights(given[name])
    x = torch.randn(40, HIDDEN).to(dtype)
    logits = x.float() @ given["gate"]["weight"].float().T + given["gate"]["bias"]
    ids = (logits.sigmoid() + given["gate"]["e_score_correction_bias"]).topk(2, 1).indices
    weights = logits.sigmoid().gather(1, ids)
    weights = weights / weights.sum(1, keepdim=True) * 1.5
    expected = torch.zeros(40, HIDDEN)
    for token, rank in ((token, rank) for token in range(40) for rank in range(2)):
        up, down = (given[f"experts.{ids[token, rank]}.{each}_proj"] for each in ("gate_up", "down"))
        wide = up["weight"].float() @ x[token].float() + up["bias"]
        narrow = torch.nn.functional.gelu(wide[:WIDTH]) * wide[WIDTH:]
        expected[token] += weights[token, rank] * (down["weight"].float() @ narrow + down["bias"])
    if is_shared:
        expected += torch.sigmoid(x.float() @ given["shared_expert_gate"]["weight"].float().T) * x.flip(1).float()
    error = (layer(x, NO_BATCH).float() - expected).abs().max() / expected.abs().max()
    assert error <= (1e-5 if dtype is torch.float32 else 0.02)


@pytest.mark.parametrize("is_fused", [True, False])
def test_experts_in_one_tensor_are_those_of_many(is_fused: bool, mixture: Path, paged_run: Any) -> None:
    expected, tensors = logits_of(mixture, paged_run), load_file(mixture / "model.safetensors")
    num_bytes = weight_bytes(ModelConfig.resolve(mixture))
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (torch.stack([tensors[f"{prefix}{e}.{each}_proj.weight"] for e in range(4)])
                          for each in ("gate", "up", "down"))  # fmt: skip
        if is_fused:  # as transformers keeps them
            others |= {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}
        else:  # as GGUF files do
            others |= {f"{prefix}{each}_proj.weight": t for each, t in (("gate", gate), ("up", up), ("down", down))}
    rewrite(mixture, others)
    assert torch.equal(logits_of(mixture, paged_run), expected)
    assert weight_bytes(ModelConfig.resolve(mixture)) == num_bytes


CASES: dict[str, tuple[Stack, tuple[int, ...], Any]] = {
    "halves": (Stack(r"^x$", ("g.{}", "u.{}")), (3, 8, 5), lambda x, e: (x[e, :4], x[e, 4:])),
    "interleaved": (
        Stack(r"^x$", ("g.{}", "u.{}"), is_interleaved=True), (3, 8, 2, 5), lambda x, e: (x[e, 0::2], x[e, 1::2]),
    ),
    "biases": (Stack(r"^x$", ("g.{}", "u.{}"), is_interleaved=True), (3, 8), lambda x, e: (x[e, 0::2], x[e, 1::2])),
    "transposed": (
        Stack(r"^x$", ("g.{}", "u.{}"), is_interleaved=True, is_transposed=True), (3, 5, 8),
        lambda x, e: (x[e].T[0::2], x[e].T[1::2]),
    ),
    "flat": (Stack(r"^x$", ("d.{}",), num_experts=3), (12, 5), lambda x, e: (x[4 * e : 4 * e + 4],)),
    "flat-transposed": (
        Stack(r"^x$", ("d.{}",), is_transposed=True, num_experts=3), (12, 5), lambda x, e: (x[4 * e : 4 * e + 4].T,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("name", CASES)
def test_each_expert_gets_its_part_of_a_stack(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stack, shape, part = CASES[name]
    x = torch.randint(0, 200, shape).to(dtype)
    rewrite(tmp_path, {"x": x, "other": torch.ones(2)})
    checkpoint = UnstackedCheckpoint(open_safetensors(tmp_path), [stack])
    assert len(checkpoint.tensors) == 1 + 3 * len(stack.names)
    for expert in range(3):
        for made, expected in zip(stack.names, part(x, expert), strict=True):
            own = made.replace("{}", str(expert))
            info = checkpoint.tensors[own]
            assert (info.shape, info.num_bytes) == (tuple(expected.shape), expected.nbytes)
            for rows in (None, (1, 3)):
                with checkpoint.reading(own, rows) as data:
                    found = torch.frombuffer(data, dtype=dtype).view(-1, *expected.shape[1:])
                assert torch.equal(found, expected if rows is None else expected[1:3])
    with checkpoint.reading("other", (1, 2)) as data:
        assert len(data) == 4


@pytest.mark.parametrize(
    ("shape", "stack"),
    [
        ((), Stack("x", ("y.{}",))), ((0, 3), Stack("x", ("y.{}",))), ((2000, 0, 5), Stack("x", ("y.{}",))),
        ((4,), Stack("x", ("y.{}",))), ((4, 5, 2), Stack("x", ("y.{}", "z.{}"))),
        ((4, 5, 3), Stack("x", ("y.{}", "z.{}"), is_transposed=True)),
        ((4, 2, 2, 2), Stack("x", ("y.{}",), is_transposed=True)), ((5, 3), Stack("x", ("y.{}",), num_experts=2)),
    ],
)  # fmt: skip
def test_stacks_of_another_shape_are_refused(shape: tuple[int, ...], stack: Stack, tmp_path: Path) -> None:
    rewrite(tmp_path, {"x": torch.zeros(shape)})
    with pytest.raises(CheckpointError, match="does not hold the matrices of experts"):
        UnstackedCheckpoint(open_safetensors(tmp_path), [stack])


def test_tensors_may_be_left_out(save_checkpoint: Any, paged_run: Any) -> None:
    fields = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    folder, _ = save_checkpoint("Glm4MoeForCausalLM", **SMALL, **fields, num_mtp_layers=0)
    expected = logits_of(folder, paged_run)
    more = {"model.layers.2.eh_proj.weight": torch.ones(4, 4), "model.layers.2.mlp.gate.weight": torch.ones(4, 4)}
    rewrite(folder, load_file(folder / "model.safetensors") | more)
    assert torch.equal(logits_of(folder, paged_run), expected)


@pytest.mark.parametrize("stated", [packed.CASES[i] for i in (1, 3, 6, 7)], ids=lambda case: "-".join(map(str, case)))
def test_experts_of_gptq_and_awq(stated: dict[str, Any], mixture: Path, paged_run: Any, tmp_path: Path) -> None:
    folder = packed.quantized(mixture, tmp_path / "q", stated)
    model, expected = (load_model(ModelConfig.resolve(each)) for each in (folder, folder / "plain"))
    for own in ("gate_up_proj", "down_proj"):
        module = f"layers.1.mlp.experts.3.{own}"
        matrix = model.get_submodule(module).weight
        assert isinstance(matrix, kernels.QuantizedWeight)
        assert torch.equal(packed.rows_of(matrix), packed.rows_of(expected.get_submodule(module).weight))
    actual, exact = logits_of(folder, paged_run), logits_of(folder / "plain", paged_run)
    assert 0 < (actual - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.parametrize("name", compressed.METHODS)
def test_experts_of_floats(name: str, mixture: Path, paged_run: Any, tmp_path: Path) -> None:
    stated, make, tolerance = compressed.METHODS[name]
    config, plain = compressed.quantized(tmp_path, mixture, stated, make)
    compressed.check(config, plain, paged_run, tolerance=tolerance)


@pytest.mark.parametrize("index", [2, 9, 14])
def test_experts_of_compressed_tensors(index: int, mixture: Path, paged_run: Any, tmp_path: Path) -> None:
    module, scales = compressed.PACKED[index]
    config, plain = compressed.quantized(
        tmp_path, mixture, compressed.section(module), lambda _, shape: compressed.compressed(module, shape, scales)
    )
    compressed.check(config, plain, paged_run, tolerance=0.03)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.BF16])
def test_experts_of_gguf_files(kind: Kind, mixture: Path, paged_run: Any, tmp_path: Path) -> None:
    def of_experts(name: str) -> Kind:
        return kind if "_exps" in name else Kind.F32

    blocks, plain = (
        ModelConfig.resolve(convert(mixture, tmp_path / f"{dequantized}.gguf", of_experts, dequantized=dequantized))
        for dequantized in (False, True)
    )
    blocks = dataclasses.replace(blocks, dtype="float32")
    matrix, expected = (
        load_model(config).get_submodule("layers.1.mlp.experts.3.down_proj").weight for config in (blocks, plain)
    )
    assert torch.equal(packed.rows_of(matrix), packed.rows_of(expected))
    actual, exact = packed.logits_of(blocks, paged_run), packed.logits_of(plain, paged_run)
    assert (actual - exact).norm() <= 0.03 * exact.norm()
    if kernels.isa() != "reference":
        save_quantized(dataclasses.replace(blocks, quantization="int4"), tmp_path / "saved", lambda _: None)
        again = dataclasses.replace(plain, quantization="int4")
        assert torch.equal(logits_of(tmp_path / "saved", paged_run), packed.logits_of(again, paged_run))


@pytest.mark.parametrize(("hidden", "width", "limit"), [(128, 64, 7.0), (96, 160, 0.5)])
def test_experts_of_gpt_oss_in_mxfp4(
    hidden: int, width: int, limit: float, save_checkpoint: Any, paged_run: Any
) -> None:
    fields = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 32}
    fields |= {"hidden_size": hidden, "intermediate_size": width, "swiglu_limit": limit}
    folder, _ = save_checkpoint("GptOssForCausalLM", **fields)
    tensors, stored = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, k, n = tensors[name].shape
        blocks = torch.randint(0, 256, (num_experts, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 121, (num_experts, n, k // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    rewrite(folder, tensors)
    expected = load_model(ModelConfig.resolve(folder))
    exact = logits_of(folder, paged_run)
    rewrite(folder, {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in stored} | stored)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    model = load_model(ModelConfig.resolve(folder))
    for own in ("gate_up_proj", "down_proj"):
        found, plain = (each.get_submodule(f"layers.1.mlp.experts.2.{own}") for each in (model, expected))
        assert found.weight.format == "mxfp4"
        assert torch.equal(packed.rows_of(found.weight), packed.rows_of(plain.weight))
        assert torch.equal(found.bias, plain.bias)
    actual = logits_of(folder, paged_run)
    assert 0 < (actual - exact).norm() <= 0.03 * exact.norm()


def test_a_config_whose_numbers_do_not_fit_is_refused(mixture: Path) -> None:
    path = mixture / "config.json"
    fields = json.loads(path.read_text())
    for change, told in (
        ({"num_experts_per_tok": 5}, "5 experts for each token, which chooses from 4: there must be 1 to 4"),
        ({"mlp_only_layers": "0"}, "'mlp_only_layers' must be a list of layers' numbers"),
        (
            {"num_local_experts": 1024, "num_experts": 1024, "num_hidden_layers": 65},
            "have 66560 experts, more than 65536",
        ),
        ({"num_local_experts": 2000, "num_experts": 2000}, "2000 experts: there must be 1 to 1024"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(CheckpointError, match=told):
            load_model(ModelConfig.resolve(mixture))
