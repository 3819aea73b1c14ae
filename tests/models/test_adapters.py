"""Adapters in a model: as peft computes them, each with the bits that it has alone, and the base model's untouched."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from quire.common.batch import Batch, Draw, DrawnRows, ScheduledSequence
from quire.common.errors import CheckpointError, ConfigError, OutOfMemoryError
from quire.config.args import EngineArgs
from quire.config.checkpoint.location import EMBEDDED_ROOT
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.models.activations import activation_bytes
from quire.models.adapters.peft import inspect_adapter
from quire.models.adapters.slots import adapter_reserve
from quire.models.layers.batch_tensors import most_read
from quire.models.layers.linear import Linear
from quire.runner.memory_plan import plan_memory
from tests.kernels.isas import needs_native
from tests.models.adapters import Steps, make_tensors, tiny_sizes, write_adapter
from tests.models.gguf_convert import convert
from tests.models.test_activations import Watched
from tests.models.test_against_transformers import LLAMA, VARIANTS

TOLERANCE = 1e-4
TRAINED = {"pirate": EMBEDDED_ROOT / "pirate", "butler": Path(__file__).parents[1] / "data" / "adapters" / "butler"}
RANKS = (4, 5, 8, 16, 24, 32, 48, 64)
PROMPT = [(7 * i) % 90 for i in range(12)]


def peft_adapter(folder: Path, base: Any, **config: Any) -> tuple[Path, Any]:
    """A saved adapter of random weights, and the model with it."""
    import peft

    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    model.save_pretrained(folder)
    return folder, model.eval()


@torch.no_grad()
def differences(steps: Steps, oracle: Any, slot: int) -> list[float]:
    """The largest difference of a logit after a prefill and after each decode step, as a share of the largest logit."""
    steps.restart([slot] * len(steps.prompts))
    prompt = list(steps.prompts[0])
    expected = oracle(torch.tensor([prompt])).logits[0].float().numpy()
    actual = steps.run(0, len(prompt) - 3, 1, 1, 1)
    pairs = zip(actual, expected[-4:], strict=True)
    return [float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in pairs]


LLAMA_ALL = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
PEFT_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama-gqa", LLAMA_ALL),
    "llama-biases": ("llama-biases", LLAMA_ALL),
    "opt": ("opt", LLAMA_ALL),
    "opt with projections": ("opt-350m-like", LLAMA_ALL),
    "mistral": ("mistral", LLAMA_ALL),
    "qwen2": ("qwen2", LLAMA_ALL),
    "qwen3": ("qwen3", LLAMA_ALL),
    "transposed matrices": ("gpt2", LLAMA_ALL | {"fan_in_fan_out": True}),
    "heads by group": ("gpt-neox", LLAMA_ALL),
    "scaled outputs": ("granite", LLAMA_ALL),
    "experts": ("qwen3-moe", LLAMA_ALL | {"target_modules": ["q_proj", "o_proj"]}),
    "a shared expert": ("qwen2-moe", LLAMA_ALL | {"target_modules": ["v_proj", "gate_proj", "up_proj", "down_proj"]}),
    "latents": (
        "deepseek-v3",
        LLAMA_ALL | {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
    "some modules": ("llama-gqa", {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "rsLoRA": ("llama-gqa", LLAMA_ALL | {"use_rslora": True}),
    "patterns": (
        "llama-gqa",
        LLAMA_ALL
        | {"rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 6, r"mlp\.\w+_proj": 12}}
        | {"alpha_pattern": {r"^model.layers.0.self_attn.v_proj": 32, "(up|gate)_proj": 5}},
    ),
    "some layers": ("llama-gqa", LLAMA_ALL | {"target_modules": ["o_proj"], "layers_to_transform": [1]}),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
@pytest.mark.parametrize("name", PEFT_CONFIGS)
def test_logits_are_those_of_peft(name: str, save_checkpoint: Any, tmp_path: Path) -> None:
    variant, lora = PEFT_CONFIGS[name]
    architecture, fields = VARIANTS[variant]
    folder, base = save_checkpoint(architecture, **fields)
    steps = Steps(ModelConfig.resolve(str(folder), dtype="float32"), [PROMPT], LoRAConfig(2, 16))
    without = differences(steps, base, -1)
    adapter, oracle = peft_adapter(tmp_path / "adapter", base, **lora)
    assert min(differences(steps, oracle, -1)) > 0.01, "the adapter should change every logit"
    steps.worker.load_adapter(1, adapter)
    assert max(without + differences(steps, oracle, 1)) < TOLERANCE


@pytest.fixture(params=["float32", "bfloat16", "int8", "int4"])
def config(request: pytest.FixtureRequest, save_checkpoint: Any) -> ModelConfig:
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    quantization = request.param if request.param.startswith("int") else None
    dtype = "bfloat16" if quantization else request.param
    return ModelConfig.resolve(str(folder), dtype=dtype, quantization=quantization)


@pytest.mark.essential
@needs_native
def test_each_adapter_in_a_mixed_batch_has_the_bits_it_has_alone(config: ModelConfig, tmp_path: Path) -> None:
    """Eight adapters of ranks 4 to 64, two sequences without, one that shares an adapter; prefills beside decodes."""
    adapters = [*range(len(RANKS)), -1, -1, 3]
    prompts = [[(s + 5 * i * (s + 1)) % 90 for i in range(12)] for s in range(len(adapters))]
    steps = Steps(config, prompts, LoRAConfig(len(RANKS), max(RANKS)))
    plain = Steps(config, prompts, None)
    sizes = tiny_sizes(config)
    for slot, rank in enumerate(RANKS):
        chosen = {name: size for i, (name, size) in enumerate(sizes.items()) if slot < 2 or i % 3 != slot % 3}
        tensors = make_tensors(chosen, rank, slot)
        steps.worker.load_adapter(slot, write_adapter(tmp_path / str(slot), tensors, r=rank, lora_alpha=8))
    alone = []
    for s in range(len(adapters)):
        steps.restart(adapters)
        alone.append(steps.run(s, 8, 1, 1, 1, 1))
    for s in (8, 9):
        plain.restart()
        for ours, theirs in zip(alone[s], plain.run(s, 8, 1, 1, 1, 1), strict=True):
            assert np.array_equal(ours, theirs), "a sequence without an adapter should have the base model's bits"
    assert len({logits[-1].tobytes() for logits in alone}) == len(alone)

    steps.restart(adapters)
    everyone = range(len(adapters))
    seen: dict[int, list[np.ndarray]] = {s: [] for s in everyone}
    first, rest = everyone[::2], everyone[1::2]
    schedule = [dict.fromkeys(first, 8), dict.fromkeys(first, 1) | dict.fromkeys(rest, 8)]
    schedule += [dict.fromkeys(everyone, 1), dict.fromkeys(reversed(everyone), 1), dict.fromkeys(everyone, 1)]
    schedule += [dict.fromkeys(rest, 1)]
    for counts in schedule:
        for s, logits in steps.step(counts).items():
            seen[s].append(logits)
    for s in everyone:
        for ours, theirs in zip(seen[s], alone[s], strict=True):
            assert np.array_equal(ours, theirs), f"sequence {s} with adapter {adapters[s]}"


@needs_native
def test_one_recording_serves_any_mix_and_sees_new_adapters(config: ModelConfig, tmp_path: Path) -> None:
    steps = Steps(config, [PROMPT] * 3, LoRAConfig(2, 8))
    sizes = tiny_sizes(config)
    folders = [write_adapter(tmp_path / str(i), make_tensors(sizes, 4 + i, i), r=4 + i) for i in range(3)]

    def logits(mix: tuple[int, ...]) -> list[bytes]:
        steps.restart(mix)
        steps.step({0: 8, 1: 8, 2: 8})
        return [row.tobytes() for row in steps.step({0: 1, 1: 1, 2: 1}).values()]

    steps.worker.load_adapter(0, folders[0])
    steps.worker.load_adapter(1, folders[1])
    base, first, second = logits((-1, 0, 1))
    assert len({base, first, second}) == 3
    assert logits((1, -1, 0)) == [second, base, first]
    assert logits((-1, -1, -1)) == [base] * 3
    steps.worker.load_adapter(0, folders[2])
    third = logits((0, -1, -1))[0]
    assert third not in (base, first, second)
    steps.worker.load_adapter(1, folders[0])
    assert logits((1, 0, 1)) == [first, third, first]
    assert len(steps.worker.runner._graphs._recorded) == 4, "of prompts and of tokens, without adapters and for any mix"


def test_a_slot_is_as_it_was_after_a_failure(config: ModelConfig, tmp_path: Path) -> None:
    steps = Steps(config, [PROMPT], LoRAConfig(1, 4))
    sizes = tiny_sizes(config)
    good = write_adapter(tmp_path / "good", make_tensors(sizes, 4), r=4)
    steps.worker.load_adapter(0, good)
    steps.restart([0])
    before = steps.run(0, 8, 1)
    with pytest.raises(CheckpointError, match=r"rank 5 of .* is more than max_lora_rank=4"):
        steps.worker.load_adapter(0, write_adapter(tmp_path / "large", make_tensors(sizes, 5), r=5))
    steps.restart([0])
    assert all(map(np.array_equal, before, steps.run(0, 8, 1)))


def test_slots_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.resolve("quire-draft")
    steps = Steps(config, [PROMPT], LoRAConfig(2, 4))
    folder = write_adapter(tmp_path / "a", make_tensors(tiny_sizes(config), 2), r=2)
    steps.worker.load_adapter(1, folder)
    steps.restart([0])
    with pytest.raises(CheckpointError, match="the adapter in slot 0 is asked for, but none is loaded"):
        steps.step({0: 4})
    steps.worker.unload_adapter(1)
    steps.restart([1])
    with pytest.raises(CheckpointError, match="slot 1"):
        steps.step({0: 4})
    for slot in (-1, 2):
        with pytest.raises(ConfigError, match=f"slot {slot} of adapters does not exist: there are 0 to 1"):
            steps.worker.load_adapter(slot, folder)
        with pytest.raises(ConfigError, match=f"slot {slot} of adapters does not exist"):
            steps.worker.unload_adapter(slot)


def test_a_worker_made_without_adapters_refuses_them(tmp_path: Path) -> None:
    steps = Steps(ModelConfig.resolve("quire-draft"), [PROMPT], None)
    steps.restart([0])
    with pytest.raises(ConfigError, match=r"slots \[0\] are asked for, but this worker was made without"):
        steps.step({0: 4})
    with pytest.raises(ConfigError, match="set enable_lora"):
        steps.worker.load_adapter(0, tmp_path)
    with pytest.raises(ConfigError, match="set enable_lora"):
        steps.worker.unload_adapter(0)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_adapter_is_the_same_on_a_gguf_file_of_the_model(
    quantization: str | None, save_checkpoint: Any, tmp_path: Path
) -> None:
    """Rows of queries and keys lie in another order in such a file; loading puts them back, so the adapter fits."""
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    adapter = write_adapter(tmp_path / "a", make_tensors(tiny_sizes(ModelConfig.resolve(folder)), 4), r=4)
    logits = []
    for path in (folder, convert(folder, tmp_path / "m.gguf")):
        config = ModelConfig.resolve(str(path), dtype="float32", quantization=quantization)
        steps = Steps(config, [PROMPT], LoRAConfig(1, 4))
        steps.worker.load_adapter(0, adapter)
        base = steps.run(0, 8)
        steps.restart([0])
        logits.append(steps.run(0, 8, 1))
        assert not np.array_equal(base[0], logits[-1][0])
    assert all(map(np.array_equal, *logits))


@needs_native
def test_the_planned_memory_is_what_adapters_and_their_kernels_take(
    save_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    config, lora, num_tokens = ModelConfig.resolve(folder), LoRAConfig(3, 64), 64
    steps = Steps(config, [[5] * num_tokens], lora)
    adapter = write_adapter(tmp_path / "a", make_tensors(tiny_sizes(config), 64), r=64)
    steps.worker.load_adapter(0, adapter)
    info = inspect_adapter(adapter, config, 64)
    layers = [module for module in steps.worker.runner.model.modules() if isinstance(module, Linear)]
    kept = [layer.adapters.weights[0] for layer in layers if layer.adapters is not None]
    assert sum(weight.nbytes for weight in kept if weight is not None) == info.num_bytes
    assert adapter_reserve(config, lora) == 3 * info.num_bytes
    assert adapter_reserve(config, LoRAConfig(3, 64, 12345)) == 12345

    workspace, forward = Watched(), steps.worker.runner.model.forward

    def watched(*args: Any) -> torch.Tensor:
        with workspace.recording():
            return forward(*args)

    monkeypatch.setattr(steps.worker.runner.model, "forward", watched)
    steps.restart([0])
    draws = (Draw(0.0, 0, 1.0, b""),)
    drawn = DrawnRows(draws, 0, most_read(num_tokens))  # then the last layer takes most, beside all rows
    tokens = tuple(steps.prompts[0])
    steps.worker.execute(Batch(0, (ScheduledSequence(0, tokens, 0, steps.tables[0], drawn, adapter=0),)))
    assert workspace.peak_bytes == activation_bytes(config, num_tokens, lora) > activation_bytes(config, num_tokens)


def test_steps_without_adapters_are_planned_too(save_checkpoint: Any) -> None:
    """Products by quantized matrices, which then compute the activation themselves, may take more than with them."""
    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    config = ModelConfig.resolve(folder, quantization="int4")
    assert activation_bytes(config, 64, LoRAConfig(3, 4)) >= activation_bytes(config, 64)


def test_the_plan_shows_the_reserve_and_takes_it_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="quire-tiny", memory_limit="36MiB", max_num_batched_tokens=64, max_num_seqs=4)
    without = plan_memory(args)
    config = dataclasses.replace(args.resolve(), lora=LoRAConfig(4, 16, 2**20))
    monkeypatch.setattr(EngineArgs, "resolve", lambda self: config)
    plan = plan_memory(args)
    assert plan.adapter_bytes == plan.to_dict()["adapter_bytes"] == 2**20
    assert plan.total_bytes <= 36 * 2**20
    assert plan.kv_cache.total_bytes < without.kv_cache.total_bytes
    assert "adapters    1.00 MiB for 4 of rank 16" in str(plan)
    assert "adapters" not in str(without)
    config = dataclasses.replace(config, lora=LoRAConfig(4, 16, 2**30))
    with pytest.raises(OutOfMemoryError, match="weights, adapters and activations"):
        plan_memory(args)


@needs_native
def test_trained_adapters_answer_in_their_own_manner_in_one_batch() -> None:
    """`tools/train_tiny/adapters.py` trained them. The third sequence has none."""
    config = ModelConfig.resolve("quire-tiny")
    tokenizer = Tokenizer.from_file(str(config.path / "tokenizer.json"))
    question = "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n"
    steps = Steps(config, [[*tokenizer.encode(question).ids, *[0] * 24] for _ in range(3)], LoRAConfig(2, 8))
    for slot, folder in enumerate(TRAINED.values()):
        steps.worker.load_adapter(slot, folder)
    steps.restart([0, 1, -1])
    count = end = len(steps.prompts[0]) - 24
    while end < len(steps.prompts[0]):
        for s, logits in steps.step(dict.fromkeys(range(3), count)).items():
            steps.prompts[s][end] = int(logits.argmax())
        count, end = 1, end + 1
    answers = [tokenizer.decode(tokens).partition("assistant\n")[2] for tokens in steps.prompts]
    assert [answer.startswith(start) for answer in answers for start in ("Arr, matey!", "Certainly, sir.")] == [
        True, False, False, True, False, False,
    ], answers  # fmt: skip
