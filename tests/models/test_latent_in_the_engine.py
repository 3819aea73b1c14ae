"""Multi-head latent attention through the whole engine: transformers' tokens, from one row of a token and layer."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import SamplingParams, kernels
from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config.args import EngineArgs
from quire.config.hf_config import HFConfig
from quire.config.kv_cache import LatentSpec
from quire.config.kv_layout import kv_cache_config
from quire.config.model import ModelConfig
from quire.models.adapters.adapter import projections
from quire.models.adapters.peft import read_adapter
from quire.models.families.latent.deepseek import DeepseekV2ForCausalLM
from quire.models.weights.loader import build_model, load_model, open_weights, weight_bytes
from quire.models.weights.saving import save_quantized
from quire.runner.memory_plan import plan_memory
from tests.kernels.isas import needs_native
from tests.models.adapters import make_tensors, write_adapter
from tests.models.latent import DEEPSEEK, LATENT
from tests.models.test_against_transformers import oracle_logits
from tests.models.test_packed_integers import logits_of
from tests.models.test_windows_in_the_engine import make_llm, run

V2_LITE = {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "vocab_size": 102400,
    "intermediate_size": 10944, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "topk_method": "greedy", "scoring_func": "softmax", "max_position_embeddings": 163840,
    "rope_theta": 10000, "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
"""Of DeepSeek-V2-Lite's config.json."""
SHARED = [7 * i % 500 + 3 for i in range(40)]
PROMPTS = [SHARED + [50 + i] * (9 * i + 1) for i in range(4)]
BLOCKS = {"block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 24}


@pytest.fixture
def deepseek(save_checkpoint: Any) -> tuple[Path, Any]:
    architecture, fields = LATENT["deepseek-v3"]
    made: tuple[Path, Any] = save_checkpoint(architecture, **fields | {"vocab_size": 512})
    return made


@pytest.mark.parametrize("preemption", ["none", "recompute", "swap"])
def test_tokens_are_transformers_through_prefix_hits_and_preemption(preemption: str, deepseek: Any) -> None:
    folder, oracle = deepseek
    small: dict[str, Any] = {"num_gpu_blocks_override": 42, "preemption_mode": preemption}
    small |= {"swap_space": 0.01} if preemption == "swap" else {}
    llm = make_llm(folder, **BLOCKS | (small if preemption != "none" else {}))
    tokens, again = (run(llm, PROMPTS, 40)[0] for _ in range(2))
    assert again == tokens
    for prompt, generated in zip(PROMPTS, tokens, strict=True):
        theirs = oracle_logits(oracle, prompt + generated, 128)[len(prompt) - 1 : -1]
        assert len(set(generated)) > 5, "degenerate output compares little"
        assert theirs.argmax(-1).tolist() == generated
    stats = llm.engine.stats()
    assert stats.prefix_cache["hit"] > 0
    assert bool(llm.engine.scheduler.preemptor.num_preemptions) == (preemption != "none")
    assert bool(stats.num_swapped_blocks) == (preemption == "swap")


def test_forks_and_tails_of_blocks_change_no_token(deepseek: Any) -> None:
    """Samples share the prompt's blocks and copy the last one; a longer prompt copies the slots of its tail."""
    folder, _ = deepseek
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=14, ignore_eos=True, detokenize=False)
    answers = []
    for caching in (False, True):
        llm = make_llm(folder, **BLOCKS, enable_prefix_caching=caching)
        prompts = [SHARED[:13], [*SHARED[:14], 9, 8], SHARED[:13]]
        outputs = [llm.generate([{"prompt_token_ids": prompt}], params)[0] for prompt in prompts]
        answers.append([[sample.token_ids for sample in output.outputs] for output in outputs])
        llm.engine.blocks.check_integrity()
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0][0]}) == 3


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompts_bits_do_not_depend_on_its_batch_or_chunks(dtype: str, deepseek: Any, paged_run: Any) -> None:
    config = ModelConfig.resolve(deepseek[0], dtype=dtype)
    model = load_model(config)
    alone = [paged_run(model, config, [prompt]).step([len(prompt)])[0] for prompt in PROMPTS[:3]]
    together, rows = paged_run(model, config, PROMPTS[:3]), [[], [], []]  # type: ignore[var-annotated]
    for counts in ([1, 40, 7], [40, 0, 30], [0, 9, 1], [0, 1, 21]):
        for s, logits in enumerate(together.step(counts)):
            rows[s].append(logits)
    for of_one, of_all in zip(alone, rows, strict=True):
        joined = torch.cat(of_all)
        assert torch.equal(joined, of_one[: len(joined)])


def test_the_cache_is_as_small_as_latent_attention_promises(deepseek: Any) -> None:
    config = dataclasses.replace(
        ModelConfig.resolve("quire-tiny", dtype="bfloat16"), hf_config=HFConfig(V2_LITE, "config.json")
    )
    specs = DeepseekV2ForCausalLM.kv_cache_specs(config)
    assert set(specs) == {LatentSpec(512, 64, "bfloat16")}
    cache = kv_cache_config(specs, 16, num_blocks=10)
    assert cache.bytes_per_token == (512 + 64) * 2 * 27
    assert cache.total_bytes == 10 * 16 * (512 + 64) * 2 * 27
    plan = plan_memory(EngineArgs(model=str(deepseek[0]), tokenizer="quire-tiny", num_gpu_blocks_override=9))
    assert plan.to_dict()["kv_bytes_per_token"] == (24 + 8) * 4 * 3
    assert f"float32, {(24 + 8) * 4 * 3} bytes each" in str(plan)
    assert plan.weight_bytes == weight_bytes(plan.config.model)


def test_the_scale_holds_the_square_of_the_mscale() -> None:
    attention = DeepseekV2ForCausalLM.latent_shape(HFConfig(V2_LITE, "config.json"))
    assert attention.scale == pytest.approx(192**-0.5 * (0.0707 * 3.6888794541 + 1) ** 2)


def test_an_int8_cache_is_refused_by_name(deepseek: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8': this model keeps one latent"):
        make_llm(deepseek[0], max_model_len=128, kv_cache_dtype="int8")


@needs_native
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_change_little_and_save_the_heads_matrices_as_they_are(
    quantization: str, save_checkpoint: Any, tmp_path: Path, paged_run: Any
) -> None:
    folder, _ = save_checkpoint("DeepseekV2ForCausalLM", **DEEPSEEK | {"num_experts_per_tok": 8})
    plain, config = (ModelConfig.resolve(folder, quantization=each) for each in (None, quantization))
    expected, actual = logits_of(plain, paged_run), logits_of(config, paged_run)
    tolerance = 0.05 if quantization == "int8" else 0.6
    assert 0 < (actual - expected).abs().max() <= tolerance * expected.abs().max()
    model: Any = load_model(config)
    assert model.layers[0].self_attn.kv_b_proj.absorbs_queries.dtype is torch.float32
    save_quantized(config, tmp_path / "saved", lambda _: None)
    assert torch.equal(logits_of(ModelConfig.resolve(tmp_path / "saved"), paged_run), actual)


def store_in_float8(folder: Path) -> None:
    """Replace the matrices by E4M3 numbers with a scale for each block of 16 x 16, and keep what they stand for."""
    tensors, path = {}, folder / "model.safetensors"
    for name, tensor in load_file(path).items():
        is_matrix = "_proj" in name and tensor.dim() == 2
        tensors[name] = tensor
        if is_matrix:
            n, k = tensor.shape
            padded = torch.zeros(-(-n // 16) * 16, -(-k // 16) * 16)
            padded[:n, :k] = tensor
            blocks = padded.view(padded.shape[0] // 16, 16, padded.shape[1] // 16, 16)
            scales = blocks.abs().amax((1, 3)) / 448
            numbers = (blocks / scales[:, None, :, None].clamp(min=1e-12)).reshape(padded.shape)[:n, :k]
            tensors[name] = numbers.to(torch.float8_e4m3fn).contiguous()
            tensors[f"{name.removesuffix('.weight')}.weight_scale_inv"] = scales
    save_file(tensors, path, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(values))


def test_float8_in_blocks_is_expanded_the_plan_counts_it_and_saving_keeps_it(
    save_checkpoint: Any, tmp_path: Path, paged_run: Any
) -> None:
    fields = DEEPSEEK | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    folder, _ = save_checkpoint("DeepseekV3ForCausalLM", **fields)
    plain = ModelConfig.resolve(folder)
    expected, plain_bytes = logits_of(plain, paged_run), weight_bytes(plain)
    store_in_float8(folder)
    config = ModelConfig.resolve(folder)
    actual = logits_of(config, paged_run)
    assert 0 < (actual - expected).abs().max() <= 0.2 * expected.abs().max()
    assert weight_bytes(config) == plain_bytes
    if kernels.isa() != "reference":
        quantized = ModelConfig.resolve(folder, quantization="int8")
        save_quantized(quantized, tmp_path / "saved", lambda _: None)
        saved = logits_of(ModelConfig.resolve(tmp_path / "saved"), paged_run)
        assert torch.equal(saved, logits_of(quantized, paged_run))


def test_the_layer_that_predicts_further_tokens_is_not_read(deepseek: Any) -> None:
    folder, _ = deepseek
    tensors = load_file(folder / "model.safetensors")
    extra = {name.replace("layers.1.", "layers.3."): t.clone() for name, t in tensors.items() if "layers.1." in name}
    save_file(tensors | extra | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    load_model(ModelConfig.resolve(folder))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scoring_func": "softmax"}, UnsupportedModelError, "'scoring_func' is 'softmax', supported is sigmoid"),
        ({"topk_method": "greedy"}, UnsupportedModelError, "'topk_method' is 'greedy', supported is noaux_tc"),
        ({"moe_layer_freq": 2}, UnsupportedModelError, "'moe_layer_freq' is '2'"),
        ({"first_k_dense_replace": -1}, CheckpointError, "'first_k_dense_replace' is -1"),
        ({"kv_lora_rank": 23}, CheckpointError, "'kv_lora_rank' is 23, but must be even"),
        ({"qk_rope_head_dim": 7}, CheckpointError, "even number of dimensions, not 7"),
        ({"kv_lora_rank": 32}, CheckpointError, r"kv_a_layernorm.weight \[24\] instead of \[32\]"),
        ({"v_head_dim": None}, CheckpointError, "has no 'v_head_dim'"),
        ({"n_group": 3}, CheckpointError, "2 of 3 groups of 8 experts: groups must have the same size"),
    ],
)
def test_configs_that_cannot_be_run_are_refused(changes: Any, error: Any, message: str, deepseek: Any) -> None:
    config = ModelConfig.resolve(deepseek[0], hf_overrides=changes)
    with pytest.raises(error, match=message):
        load_model(config)


def test_adapters_go_to_every_projection_but_the_heads_matrices(deepseek: Any, tmp_path: Path) -> None:
    config = ModelConfig.resolve(deepseek[0])
    model = build_model(config, open_weights(config))
    adapted = {name.rpartition(".")[2] for _, names in projections(model) for name in names if "self_attn" in name}
    assert adapted == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
    tensors = make_tensors({"model.layers.0.self_attn.kv_b_proj": (88, 24)}, 4)
    folder = write_adapter(tmp_path / "adapter", tensors, target_modules=["kv_b_proj"], r=4, lora_alpha=4)
    with pytest.raises(UnsupportedModelError, match=r"kv_b_proj': this model has no such module, or it cannot have"):
        read_adapter(folder, model, 8)
