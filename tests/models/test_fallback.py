"""Architectures without a class of Quire's own, through transformers' modules: its tokens, whatever the cache does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams, kernels
from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.args import EngineArgs
from quire.config.checkpoint.architectures import MODELS
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.kernels.backends.shapes import _Made
from quire.models.activations import activation_bytes
from quire.models.fallback.model import TransformersCausalLM
from quire.models.weights.loader import load_model, weight_bytes
from quire.models.weights.saving import save_quantized
from quire.runner.memory_plan import plan_memory
from tests.kernels.isas import needs_native
from tests.models.adapters import Steps, make_tensors, tiny_sizes, write_adapter
from tests.models.test_against_transformers import assert_same_logits, oracle_logits, prompts
from tests.models.test_packed_integers import quantized

NUM_TOKENS = 64
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
GPT = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "head_dim": 8}

DECODING_BERT = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"} | {
    "is_decoder": True, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

EXPERTS = SHAPE | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": EXPERTS | WINDOWS | {"global_attn_every_n_layers": 2},
    "AXK1ForCausalLM": SHAPE
    | LATENT
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1},
    "BeamForCausalLM": EXPERTS | WINDOWS,
    "Cohere2MoeForCausalLM": EXPERTS | WINDOWS,
    "ExaoneMoeForCausalLM": EXPERTS | WINDOWS,
    "FlintForCausalLM": EXPERTS | WINDOWS | {"shared_expert_intermediate_size": 16},
    "GraniteMoeSWAForCausalLM": SHAPE | WINDOWS | {"num_local_experts": 6},
    "HYV3ForCausalLM": EXPERTS,
    "Kolibri1ForCausalLM": EXPERTS | WINDOWS | {"shared_expert_intermediate_size": 16},
    "LagunaForCausalLM": EXPERTS | WINDOWS | {"shared_expert_intermediate_size": 16},
    "MellumForCausalLM": EXPERTS | WINDOWS,
    "MiMoV2FlashForCausalLM": SHAPE
    | WINDOWS
    | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "v_head_dim": 4},
}
"""The same with experts, which Quire's kernels compute."""
GEMMA4 = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "tie_word_embeddings": False, "pad_token_id": 0}
ARCHITECTURES: dict[str, dict[str, Any]] = MIXTURES | {
    "Apertus1p5TextForCausalLM": SHAPE | {"rope_parameters": PLAIN},
    "CodeGenForCausalLM": GPT | {"rotary_dim": 4},
    "Gemma4ForCausalLM": SHAPE | WINDOWS | GEMMA4,
    "Gemma4UnifiedForCausalLM": SHAPE | WINDOWS | GEMMA4,
    "BertGenerationDecoder": DECODING_BERT,
    "BertLMHeadModel": DECODING_BERT,
    "BitNetForCausalLM": SHAPE,
    "CTRLLMHeadModel": {key: value for key, value in GPT.items() if key != "pad_token_id"} | {"dff": 48},
    "Lfm2ForCausalLM": SHAPE | {"layer_types": ["full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "CwmForCausalLM": SHAPE | WINDOWS | {"rope_parameters": PLAIN},
    "ErnieForCausalLM": DECODING_BERT,
    "GPTBigCodeForCausalLM": GPT,
    "GraniteSWAForCausalLM": SHAPE | WINDOWS | {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "HyperCLOVAXForCausalLM": SHAPE | {"residual_multiplier": 0.5, "use_post_norm": True},
    "Jais2ForCausalLM": SHAPE,
    "MiniCPM3ForCausalLM": SHAPE | LATENT | {"tie_word_embeddings": False},
    "Ministral3ForCausalLM": SHAPE
    | {
        "head_dim": 16,
        "rope_parameters": PLAIN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32},
    },
    "ModernBertDecoderForCausalLM": {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    | {"pad_token_id": 0, "tie_word_embeddings": False, "local_attention": 16, "global_attn_every_n_layers": 2},
    "NanoChatForCausalLM": SHAPE,
    "PersimmonForCausalLM": SHAPE | {"num_key_value_heads": 4, "qk_layernorm": True},
    "VaultGemmaForCausalLM": SHAPE | WINDOWS | {"attn_logit_softcapping": 5.0},
    "YoutuForCausalLM": SHAPE | LATENT,
}


def small_llm(folder: Path, **arguments: Any) -> LLM:
    """Room for about two sequences, in blocks of four slots."""
    return LLM(
        str(folder),
        tokenizer="quire-tiny",
        **{"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 56, "max_model_len": 128} | arguments,
        max_num_batched_tokens=24,
    )


def run(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts, which start together. Checks the blocks after each step."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(given):
        llm.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    tokens: dict[int, list[int]] = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        llm.engine.blocks.check_integrity()
    return [tokens[i] for i in range(len(given))]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_transformers_through_paging_preemption_and_prefix_hits(
    architecture: str, save_checkpoint: Any
) -> None:
    folder, oracle = save_checkpoint(architecture, vocab_size=512, **ARCHITECTURES[architecture])
    oracle.set_experts_implementation("eager")
    llm = small_llm(folder, model_impl="transformers" if architecture in MODELS else "auto")
    assert llm.engine.plan.config.model.model_impl == "transformers"
    shared = [7 * i % 500 + 3 for i in range(26)]
    given = [shared + [50 + i] * (3 * i + 1) for i in range(3)]
    for prompt, tokens in zip(given, run(llm, given), strict=True):
        theirs = oracle_logits(oracle, prompt + tokens, len(prompt) + NUM_TOKENS)[len(prompt) - 1 : -1]
        assert len(set(tokens)) > 5, "degenerate output compares little"
        assert theirs.argmax(-1).tolist() == tokens
    assert llm.engine.scheduler.preemptor.num_preemptions > 0
    assert llm.engine.stats().prefix_cache["hit"] >= len(shared)


def test_ten_of_these_architectures_have_no_class_of_their_own() -> None:
    """The others have had one since, and run through the library when it is asked for."""
    assert len(ARCHITECTURES.keys() - MODELS) >= 10


def test_a_head_that_is_the_token_table_may_have_a_bias(save_checkpoint: Any, paged_run: Any) -> None:
    fields = ARCHITECTURES["CTRLLMHeadModel"] | {"tie_word_embeddings": True, "vocab_size": 96}
    folder, oracle = save_checkpoint("CTRLLMHeadModel", **fields)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.bias"] = torch.linspace(-3, 3, 96)
    save_file(tensors, folder / "model.safetensors")
    oracle.lm_head.bias.data = tensors["lm_head.bias"]
    config = ModelConfig.resolve(folder)
    (given,) = prompts(96)[:1]
    step = paged_run(load_model(config), config, [given]).step([len(given)])
    assert_same_logits(step[0], oracle_logits(oracle, given, len(given)))


def both(folder: Path, **arguments: Any) -> list[ModelConfig]:
    """The config of Quire's own class and of transformers' modules."""
    return [ModelConfig.resolve(folder, model_impl=impl, **arguments) for impl in ("quire", "transformers")]


def logits_of(config: ModelConfig, paged_run: Any) -> torch.Tensor:
    given = prompts(config.vocab_size)
    run = paged_run(load_model(config), config, given)
    steps = [run.step([9, 4]), run.step([14, 2])]
    return torch.cat([step[s] for step in steps for s in range(len(given))])


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_native_architecture_computes_the_same_in_any_format(
    quantization: str | None, llama: Path, paged_run: Any
) -> None:
    native, library = both(llama, quantization=quantization)
    assert_same_logits(logits_of(library, paged_run), logits_of(native, paged_run))
    assert quantization or weight_bytes(library) == weight_bytes(native)


def test_qwen3_in_bfloat16_is_near_the_native_class(save_checkpoint: Any, paged_run: Any) -> None:
    folder, _ = save_checkpoint("Qwen3ForCausalLM", dtype=torch.bfloat16, vocab_size=64, **SHAPE | {"head_dim": 16})
    native, library = (logits_of(config, paged_run) for config in both(folder))
    assert (library - native).abs().max() <= 0.05 * native.abs().max()


def test_weights_of_other_tools_run_as_in_the_native_class(llama: Path, tmp_path: Path, paged_run: Any) -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    quantized(llama, tmp_path / "stored", stated)
    native, library = both(tmp_path / "stored")
    assert_same_logits(logits_of(library, paged_run), logits_of(native, paged_run))


@needs_native
@pytest.mark.parametrize("architecture", ["BitNetForCausalLM", "GraniteSWAForCausalLM"])
def test_saved_quantized_weights_are_the_ones_quantized_while_loading(
    architecture: str, save_checkpoint: Any, tmp_path: Path, paged_run: Any
) -> None:
    folder, _ = save_checkpoint(architecture, vocab_size=96, **ARCHITECTURES[architecture])
    loaded = ModelConfig.resolve(folder, quantization="int8")
    save_quantized(loaded, tmp_path / "saved", lambda _: None)
    saved = ModelConfig.resolve(tmp_path / "saved")
    assert (saved.model_impl, saved.quantization) == ("transformers", "int8")
    assert torch.equal(logits_of(saved, paged_run), logits_of(loaded, paged_run))


def test_adapters_add_what_they_add_to_the_native_class(llama: Path, tmp_path: Path) -> None:
    native, library = both(llama)
    write_adapter(tmp_path / "adapter", make_tensors(tiny_sizes(native), 4), r=4, lora_alpha=8)
    results = []
    for config in (native, library):
        steps = Steps(config, prompts(config.vocab_size), LoRAConfig(1, 4))
        steps.worker.load_adapter(0, tmp_path / "adapter")
        steps.restart([0, -1])
        results.append(steps.step({0: 23, 1: 6}))
    for s in (0, 1):
        assert np.abs(results[1][s] - results[0][s]).max() <= 5e-5 * np.abs(results[0][s]).max()


def test_embeddings_may_stand_in_the_place_of_tokens(llama: Path, paged_run: Any) -> None:
    config = both(llama)[1]
    model, tokens = load_model(config), prompts(config.vocab_size)[1]
    run, expected = (paged_run(model, config, [tokens]) for _ in range(2))
    table = dict(model.weighted_layers())["model.embed_tokens"]
    forward = model.forward
    model.forward = lambda batch, kv: forward(replace(batch, token_ids=None, embeddings=table(batch.token_ids)), kv)
    given = run.step([len(tokens)])[0]
    model.forward = forward
    assert torch.equal(given, expected.step([len(tokens)])[0])


@needs_native
@pytest.mark.parametrize("architecture", ["CwmForCausalLM", "GPTBigCodeForCausalLM", "VaultGemmaForCausalLM"])
def test_the_planned_memory_is_what_a_step_takes(architecture: str, save_checkpoint: Any, paged_run: Any) -> None:
    folder, _ = save_checkpoint(architecture, vocab_size=96, **ARCHITECTURES[architecture])
    config = ModelConfig.resolve(folder, model_impl="transformers")
    model, meter = load_model(config), kernels.Meter()
    forward = model.forward

    def metered(*args: Any) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad(), _Made() as made:
            hidden = forward(*args)
        meter.peak_bytes = made.peak_bytes
        return hidden

    model.forward = metered
    paged_run(model, config, [range(64)]).step([64])
    assert meter.peak_bytes == activation_bytes(config, 64) > 64 * 32 * 4 * 4


def test_the_plan_says_whose_modules_run(llama: Path) -> None:
    plan = plan_memory(EngineArgs(model=str(llama), model_impl="transformers", num_gpu_blocks_override=8))
    assert "LlamaForCausalLM, transformers' modules, float32" in str(plan)
    assert plan.to_dict()["model_impl"] == "transformers"


SMALL_CONFIG = SHAPE | {"vocab_size": 96, "dtype": "float32"}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state": ("JambaForCausalLM", {}, "keeps other states than keys and values"),
    "convolutions": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "keeps other states than keys"),
    "experts that are not decorated": (
        "Llama4ForCausalLM",
        {"model_type": "llama4_text", "pad_token_id": 0, "num_local_experts": 4},
        "feed_forward.experts .*keeps the matrices of experts in one tensor",
    ),
    "experts without matrices": (
        "LongcatFlashForCausalLM",
        {"pad_token_id": 0, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
        "LongcatFlashExperts. keeps the matrices of experts in one tensor",
    ),
    "transposed experts": (
        "AriaTextForCausalLM",
        {"pad_token_id": 0},
        "AriaExperts has experts that are not plain gated",
    ),
    "recurrence": ("RecurrentGemmaForCausalLM", {"pad_token_id": 0}, "keeps other states than keys and values"),
    "a state space": ("MambaForCausalLM", {"pad_token_id": 0}, "keeps other states than keys and values"),
    "a linear recurrence": ("RwkvForCausalLM", {"pad_token_id": 0}, "keeps other states than keys and values"),
    "several configs": ("MusicgenForCausalLM", {"model_type": "musicgen"}, "a nested config is not supported"),
    "a mask": ("DogeForCausalLM", {}, "DogeAttention .* brings a mask of its own"),
    "two maps": ("DiffLlamaForCausalLM", {}, "DiffLlamaAttention attends more than once"),
    "both directions": ("BertLMHeadModel", {"pad_token_id": 0}, "sees later tokens too"),
    "other positions": ("RobertaForCausalLM", DECODING_BERT, "counts positions from the padding token's id"),
    "kept to itself": ("NemotronForCausalLM", {}, "is not handed what `forward` was given"),
    "own attention": ("BioGptForCausalLM", {}, "does not let its attention be replaced"),
    "chunks": (
        "CwmForCausalLM",
        {"layer_types": ["full_attention", "chunked_attention"], "sliding_window": 8},
        "without the library's cache, it fails: KeyError 'chunked_attention'",
    ),
    "moving frequencies": (
        "CwmForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
        "rope_type dynamic is not supported through transformers",
    ),
    "a head that reaches into the layers": (
        "OPTForCausalLM",
        {"pad_token_id": 0, "word_embed_proj_dim": 32},
        "without the library's cache, it fails: AttributeError 'GivenHidden' object has no attribute 'decoder'",
    ),
    "values of a wrong type": ("CwmForCausalLM", {"num_hidden_layers": "two"}, "transformers refuses it"),
    "a nested config": ("Llama4ForCausalLM", {"model_type": "llama4"}, "a nested config is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_weights_are_read(case: str, tmp_path: Path) -> None:
    architecture, fields, message = REFUSED[case]
    kind = getattr(transformers, architecture)
    stated = {"architectures": [architecture], "model_type": kind.config_class.model_type}
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG | stated | fields))
    with pytest.raises(UnsupportedModelError, match=message):
        TransformersCausalLM(ModelConfig.resolve(tmp_path, model_impl="transformers"))


@pytest.mark.parametrize("architecture", ["MambaForCausalLM", "RwkvForCausalLM", "xLSTMForCausalLM"])
def test_states_are_named_although_the_config_has_no_heads(architecture: str, tmp_path: Path) -> None:
    model_type = getattr(transformers, architecture).config_class.model_type
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match="keeps other states than keys and values"):
        ModelConfig.resolve(tmp_path)


def with_code(folder: Path, **fields: Any) -> Path:
    """A checkpoint that asks for code of its own, which leaves a mark where it runs."""
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code} | fields))
    (folder / "mine.py").write_text(f"open({str(folder / 'RAN')!r}, 'w')")
    return folder


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["MineForCausalLM"], "model_type": "mine"},
        {"architectures": ["MineForCausalLM"]},
        {"architectures": ["PhiModel"]},
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
    ],
)
def test_a_checkpoint_without_a_class_of_the_library_is_refused_and_its_code_never_runs(
    fields: dict[str, Any], impl: str, llama: Path
) -> None:
    folder = with_code(llama, **fields)
    with pytest.raises(UnsupportedModelError, match=r"transformers [\d.]+ has no causal language model"):
        small_llm(folder, model_impl=impl)
    assert not (folder / "RAN").exists()


def test_a_class_of_the_library_runs_without_the_code_that_a_checkpoint_asks_for(
    save_checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = save_checkpoint("BitNetForCausalLM", vocab_size=96, **ARCHITECTURES["BitNetForCausalLM"])
    config = ModelConfig.resolve(with_code(folder, attn_implementation="someone/kernels"))
    load_model(config)
    assert "never run, the model of transformers is" in caplog.text
    assert not (folder / "RAN").exists()


def test_missing_weights_are_named_as_the_library_names_them(save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("BitNetForCausalLM", vocab_size=96, **ARCHITECTURES["BitNetForCausalLM"])
    tensors = load_file(folder / "model.safetensors")
    tensors["other"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model.norm.weight; 1 weight\(s\) unexpected: other"):
        load_model(ModelConfig.resolve(folder))
