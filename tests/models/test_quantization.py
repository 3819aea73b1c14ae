"""Models with quantized matrices: near the unquantized ones, the same in any batch, and saved to be mapped."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from quire import LLM, SamplingParams, kernels
from quire.cli import main
from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.common.faults import Fault, environment
from quire.config.args import EngineArgs
from quire.config.model import ModelConfig
from quire.models.layers.embedding import Embedding
from quire.models.layers.norm import Norm
from quire.models.weights import saving
from quire.models.weights.loader import LayerLoader, assignments, load_model, weight_bytes
from quire.runner.memory_plan import plan_memory

from ..engine.test_batch_invariance import ROOMY, make_prompts, mixed_params, run
from .test_against_transformers import VARIANTS

FORMATS = ["int8", "int4"]
TOLERANCE = {"int8": 0.1, "int4": 0.7}
"""of the norm of all logits, for random weights that nothing averages out; unrelated logits are 1.4 off"""

needs_native = pytest.mark.skipif(
    kernels.isa() == "reference", reason="saved weights are in the native kernels' layout"
)


def logits_of(config: ModelConfig, paged_run: Any) -> torch.Tensor:
    prompt = [token % config.vocab_size for token in (5, 60, 3, 3, 17, 40, 8)]
    logits: torch.Tensor = paged_run(load_model(config), config, [prompt]).step([len(prompt)])[0]
    return logits


@needs_native
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize(
    "name",
    [
        "llama-mha-tied",
        "llama-biases",
        "qwen2",
        "opt",
        "opt-350m-like",
        "opt-untied-plain",
        "mixtral-window-all",
        "gpt2",
        "gpt-neox",
        "falcon-40b",
        "bloom",
        "gemma3",
        "granite",
    ],
)
def test_every_family_is_near_itself_unquantized_and_the_same_when_saved(
    name: str, quantization: str, save_checkpoint: Any, paged_run: Any, tmp_path: Path
) -> None:
    architecture, fields = VARIANTS[name]
    folder, _ = save_checkpoint(architecture, **fields)
    exact = logits_of(ModelConfig.resolve(folder), paged_run)
    quantized = logits_of(ModelConfig.resolve(folder, quantization=quantization), paged_run)
    assert 0 < (quantized - exact).norm() <= TOLERANCE[quantization] * exact.norm()
    saved = tmp_path / "new" / "saved"
    assert main(["quantize", str(folder), str(saved), "--quantization", quantization]) == 0
    config = ModelConfig.resolve(saved)
    assert (config.quantization, config.quant_method) == (quantization, "quire")
    assert torch.equal(logits_of(config, paged_run), quantized)
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("quantization", FORMATS)
def test_whatever_runs_beside_a_request_it_gets_what_it_gets_alone(quantization: str) -> None:
    prompts, params = make_prompts(16, 8192, 60), mixed_params(16)
    solo = LLM(
        quantization=quantization,
        enable_prefix_caching=False,
        max_model_len=96,
        max_num_seqs=1,
        num_gpu_blocks_override=ROOMY,
    )
    expected = [run(solo, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    plain = LLM(enable_prefix_caching=False, max_model_len=96, num_gpu_blocks_override=ROOMY)
    assert run(plain, prompts, params) != expected
    for num_blocks, caching, batched_tokens in [(6, True, 64), (9, False, 7), (40, True, 2048)]:
        llm = LLM(
            quantization=quantization,
            num_gpu_blocks_override=num_blocks,
            max_num_batched_tokens=batched_tokens,
            enable_prefix_caching=caching,
            max_model_len=96,
        )
        assert run(llm, prompts, params) == expected, f"{num_blocks} blocks"


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.2), ("int4", 5.7)])
def test_the_plan_counts_what_the_layers_keep(quantization: str, bits: float) -> None:
    config = ModelConfig.resolve("quire-tiny", quantization=quantization)
    model = load_model(config)
    kept = 0
    for assignment in assignments(model):
        layer = assignment.layer
        kept += (layer.table if isinstance(layer, Embedding) else getattr(layer, assignment.name)).nbytes
    plan = plan_memory(EngineArgs(quantization=quantization))
    assert plan.weight_bytes == weight_bytes(config) == kept <= bits / 16 * 13.65e6
    assert plan.to_dict()["quantization"] == quantization
    assert f"{quantization} weights" in str(plan)


def test_unknown_and_contradicting_quantizations_are_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="quantization='int_8', did you mean 'int8'"):
        LLM(quantization="int_8")
    with pytest.raises(ConfigError, match=r"='gtpq', did you mean 'gptq'\? \(allowed: int8, .* so: gptq, awq, "):
        LLM(quantization="gtpq")
    with pytest.raises(ConfigError, match="are int4 already"):
        LLM(model=str(saved), quantization="int8")
    assert LLM(model=str(saved), quantization="int4", max_model_len=32).generate(
        "def", SamplingParams(max_tokens=2), use_tqdm=False
    )


def test_saving_takes_a_new_folder_and_weights_that_are_not_quantized(saved: Path, capsys: Any) -> None:
    before = sorted(saved.parent.iterdir())
    assert main(["quantize", "quire-draft", str(saved)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["quantize", str(saved), str(saved.parent / "again")]) == 2
    assert "is quantized already: use it as it is, or quantize its original anew" in capsys.readouterr().err
    assert main(["quantize", "quire-draft", str(saved / "config.json" / "below")]) == 2
    assert "config.json/below' cannot be made: Not a directory" in capsys.readouterr().err
    assert sorted(saved.parent.iterdir()) == before


@needs_native
def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_running_one_stays(tmp_path: Path) -> None:
    pause = environment(Fault("weights.load", "delay", seconds=600, after=1))
    saved, beside = tmp_path / "saved", tmp_path / ".saved.0123abc"  # no name of an unfinished folder
    beside.mkdir()
    command = [sys.executable, "-m", "quire", "quantize", "quire-draft", str(saved)]
    with subprocess.Popen(command, env=os.environ | pause) as process:
        while not (found := list(tmp_path.glob(".saved.*/model.safetensors"))):
            assert process.poll() is None
        assert main(["quantize", "quire-draft", str(saved)]) == 0
        assert found[0].exists()
        process.kill()
    shutil.rmtree(saved)
    assert main(["quantize", "quire-draft", str(saved)]) == 0
    assert sorted(tmp_path.iterdir()) == [beside, saved]


@needs_native
def test_a_file_system_without_locks_keeps_what_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    (left := tmp_path / ".saved.0123abcd").mkdir()
    assert main(["quantize", "quire-draft", str(tmp_path / "saved")]) == 0
    assert left.exists()


@needs_native
def test_a_folder_that_appears_meanwhile_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, tensors: Any) -> None:
        (tmp_path / "saved" / "mine").mkdir(parents=True)

    monkeypatch.setattr(saving, "_write", write)
    assert main(["quantize", "quire-draft", str(tmp_path / "saved")]) == 2
    assert capsys.readouterr().err.endswith("saved' cannot be made: Directory not empty\n")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["mine"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The smaller embedded checkpoint in int4."""
    if kernels.isa() == "reference":
        pytest.skip("saved weights are in the native kernels' layout")
    assert main(["quantize", "quire-draft", str(tmp_path / "saved")]) == 0
    return tmp_path / "saved"


@needs_native
def test_saving_keeps_one_matrix_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_filled = 0

    def fill(loader: LayerLoader, layer: Any) -> None:
        nonlocal num_filled
        matrices = [each for each in loader.layers if not isinstance(each, Norm)]
        assert not any(hasattr(each, "weight") or hasattr(each, "table") for each in matrices)
        original(loader, layer)
        num_filled += 1

    original = LayerLoader.fill
    monkeypatch.setattr(LayerLoader, "fill", fill)
    assert main(["quantize", "quire-draft", str(tmp_path / "saved")]) == 0
    assert num_filled > 4


def test_a_failure_while_saving_leaves_nothing_behind(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(shutil, "copy", fail)
    with pytest.raises(OSError, match="no space"):
        main(["quantize", "quire-draft", str(tmp_path / "saved")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 99}, "version 99.*readable are int8, int4 in version 3"),
        ({"format": "int2"}, "'int2'"),
        ({"quant_method": "bitsandbytes"}, "take the unquantized checkpoint"),
    ],
)
def test_foreign_quantized_folders_are_refused(saved: Path, change: dict[str, Any], told: str) -> None:
    fields = json.loads((saved / "config.json").read_text())
    fields["quantization_config"] |= change
    (saved / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModelError, match=told):
        ModelConfig.resolve(saved)


def test_damaged_quantized_folders_are_refused(saved: Path) -> None:
    file = saved / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "layers.0.self_attn.o_proj.weight"
    safetensors.torch.save_file(tensors | {name: tensors[name][:-64].clone()}, file)
    with pytest.raises(CheckpointError, match=rf"wrong shape: {name} \[\d+\] instead of"):
        load_model(ModelConfig.resolve(saved))
    safetensors.torch.save_file(tensors | {name: tensors[name].float()}, file)
    with pytest.raises(CheckpointError, match=f"of a wrong dtype: {name} float32"):
        load_model(ModelConfig.resolve(saved))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(ModelConfig.resolve(saved))


def test_weights_that_are_not_finite_are_refused_by_name(save_checkpoint: Any) -> None:
    architecture, fields = VARIANTS["llama-gqa"]
    folder, _ = save_checkpoint(architecture, **fields)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, 3] = torch.nan
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight: .*NaN"):
        load_model(ModelConfig.resolve(folder, quantization="int8"))
