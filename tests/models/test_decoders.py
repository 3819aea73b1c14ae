"""Decoders as checkpoints on the Hub describe them: nested and old configs, mixed tensors, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.architectures import MODELS
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.kernels import unpack_weight
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import AttentionShape
from quire.models.families.llama import LlamaForCausalLM
from quire.models.weights.loader import build_model, load_model, open_checkpoint
from tests.models.families import FULL, NESTED, SLIDING
from tests.models.test_against_transformers import assert_same_logits, oracle_logits
from tests.models.variants import VARIANTS

PROMPT = [5, 60, 3, 3, 17, 40, 8, 91, 2, 33, 12, 7]


def checkpoint(save_checkpoint: Any, variant: str, **changes: Any) -> tuple[Path, Any]:
    architecture, fields = VARIANTS[variant]
    folder, oracle = save_checkpoint(architecture, **fields | changes)
    return folder, oracle


def rewrite(folder: Path, **changes: Any) -> None:
    """Change values of config.json; None removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def logits_of(config: ModelConfig, paged_run: Any) -> torch.Tensor:
    logits: torch.Tensor = paged_run(load_model(config), config, [PROMPT]).step([len(PROMPT)])[0]
    return logits


def nest(folder: Path, architecture: str, prefix: str) -> None:
    """Make the checkpoint the text part of a model that reads images."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    outer = {"architectures": [architecture], "dtype": "float32", "vision_config": {"hidden_size": 8}}
    outer["tie_word_embeddings"] = text.pop("tie_word_embeddings", True)
    path.write_text(json.dumps(outer | {"text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    nested = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    if "lm_head.weight" in nested and prefix == "language_model.model.":
        nested["language_model.lm_head.weight"] = nested.pop("lm_head.weight")
    nested |= {"vision_tower.embeddings.weight": torch.ones(3), "model.multi_modal_projector.w": torch.ones(2)}
    save_file(nested, folder / "model.safetensors")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize(("variant", "architecture"), NESTED.items())
def test_the_text_part_of_a_model_for_images_is_loaded(
    variant: str, architecture: str, prefix: str, save_checkpoint: Any, paged_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, oracle = checkpoint(save_checkpoint, variant)
    nest(folder, architecture, prefix)
    with caplog.at_level("INFO", logger="quire"):
        config = ModelConfig.resolve(folder)
    assert_same_logits(logits_of(config, paged_run), oracle_logits(oracle, PROMPT, len(PROMPT)))
    assert "reads images too" in caplog.text


def test_a_nested_config_without_its_text_part_is_incomplete(save_checkpoint: Any) -> None:
    folder, _ = checkpoint(save_checkpoint, "gemma3")
    nest(folder, "Gemma3ForConditionalGeneration", "model.language_model.")
    rewrite(folder, text_config=None)
    with pytest.raises(CheckpointError, match="no 'text_config': this checkpoint is incomplete"):
        ModelConfig.resolve(folder)


def test_gemma_3_as_its_first_configs_spell_it(save_checkpoint: Any, paged_run: Any) -> None:
    folder, oracle = checkpoint(save_checkpoint, "gemma3-stretched")
    rewrite(folder, rope_parameters=None, rope_theta=500.0, rope_local_base_freq=100.0)
    rewrite(folder, rope_scaling={"rope_type": "linear", "factor": 4.0}, layer_types=None, sliding_window_pattern=2)
    assert_same_logits(logits_of(ModelConfig.resolve(folder), paged_run), oracle_logits(oracle, PROMPT, len(PROMPT)))


class InChunks(LlamaForCausalLM):
    """Llama whose tokens see their own chunk, as in some layers of Llama 4."""

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(super().attention_shape(hf, layer), chunk_size=5 if layer == 0 else None)


def test_chunked_attention_sees_its_chunk_and_keeps_no_more(
    save_checkpoint: Any, paged_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = checkpoint(save_checkpoint, "llama-gqa")
    monkeypatch.setitem(MODELS, "LlamaForCausalLM", f"{__name__}:InChunks")
    config = ModelConfig.resolve(folder)
    positions = torch.arange(len(PROMPT))
    is_seen = positions[None] <= positions[:, None]
    in_chunk = is_seen & (positions[None] // 5 == positions[:, None] // 5)
    masks = [torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -torch.inf) for seen in (in_chunk, is_seen)]
    for layer, mask in zip(oracle.model.layers, masks, strict=True):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, mask=mask: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
        )
    assert_same_logits(logits_of(config, paged_run), oracle_logits(oracle, PROMPT, len(PROMPT)))
    assert [spec.max_blocks(100, 4, 1) for spec in InChunks.kv_cache_specs(config)] == [4, 25]


def test_gpt_neox_as_its_first_configs_spell_it(save_checkpoint: Any, paged_run: Any) -> None:
    folder, oracle = checkpoint(save_checkpoint, "gpt-neox")
    rewrite(folder, rope_parameters=None, rotary_pct=0.5, rotary_emb_base=500)
    assert_same_logits(logits_of(ModelConfig.resolve(folder), paged_run), oracle_logits(oracle, PROMPT, len(PROMPT)))


def test_a_limit_that_the_config_lacks_is_that_of_training(save_checkpoint: Any) -> None:
    folder, _ = checkpoint(save_checkpoint, "bloom")
    rewrite(folder, seq_length=None)
    assert ModelConfig.resolve(folder).max_model_len == 2048
    assert ModelConfig.resolve(folder, hf_overrides={"max_position_embeddings": 4096}).max_model_len == 4096


def test_layers_of_equal_rope_share_a_table(save_checkpoint: Any) -> None:
    counts = {}
    for variant in ("gemma3", "olmo3", "smollm3", "bloom"):
        folder, _ = checkpoint(save_checkpoint, variant)
        config = ModelConfig.resolve(folder)
        model = build_model(config, open_checkpoint(config.path))
        assert isinstance(model, Decoder)
        counts[variant] = len(model.rotary)
    assert counts == {"gemma3": 2, "olmo3": 2, "smollm3": 1, "bloom": 0}


@pytest.mark.parametrize("variant", ["gpt-neox", "falcon-40b", "bloom"])
def test_heads_that_lie_by_group_are_put_in_order(variant: str, save_checkpoint: Any) -> None:
    folder, oracle = checkpoint(save_checkpoint, variant)
    config = ModelConfig.resolve(folder)
    model: Any = load_model(config)
    theirs = next(module for name, module in oracle.named_modules() if name.endswith("query_key_value"))
    num_kv_heads = model.shape(config).layers[0].attention.num_kv_heads
    groups = theirs.weight.view(num_kv_heads, -1, 8, 32)  # [groups, queries + 2, head_dim, hidden]
    expected = torch.cat([groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)])
    projection = model.layers[0].self_attn.qkv_proj
    assert torch.equal(unpack_weight(projection.weight), expected)
    groups = theirs.bias.view(num_kv_heads, -1, 8)
    expected = torch.cat([groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()])
    assert torch.equal(projection.bias, expected)


def test_transposed_matrices_are_turned(save_checkpoint: Any) -> None:
    folder, oracle = checkpoint(save_checkpoint, "gpt2")
    model: Any = load_model(ModelConfig.resolve(folder))
    assert torch.equal(unpack_weight(model.layers[1].mlp.up_proj.weight), oracle.transformer.h[1].mlp.c_fc.weight.T)


@pytest.mark.parametrize("variant", ["gpt2", "gpt-neox"])
def test_other_tools_weights_of_mixed_matrices_are_refused(variant: str, save_checkpoint: Any) -> None:
    folder, _ = checkpoint(save_checkpoint, variant)
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    rewrite(folder, quantization_config=scheme)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(("c_attn.weight", "query_key_value.weight")))
    tensors[name.replace("weight", "qweight")] = tensors.pop(name).to(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"quantized by gptq are not supported for .*order of its own"):
        load_model(ModelConfig.resolve(folder))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown type of layer": ("olmo3", {"layer_types": [SLIDING, "linear_attention"]}, "linear_attention"),
    "types for other layers": ("gemma2", {"layer_types": [FULL] * 3}, "list of 2 names"),
    "types that are no list": ("cohere2", {"layer_types": "sliding"}, "must be a list of types of layers"),
    "flags for other layers": ("smollm3", {"no_rope_layers": [1, 0]}, "list of 4 flags"),
    "no parameters of a type": ("olmo3", {"rope_parameters": {FULL: {"rope_theta": 1e4}}}, f"no '{SLIDING}'"),
    "heads that do not divide": ("gpt2", {"n_head": 5}, "32 is not a multiple of 5 heads"),
    "other widths": ("starcoder2", {"intermediate_size": 40}, r"wrong shape: .*mlp.c_fc.weight \[48, 32\] instead"),
    "other layers": ("phi3", {"num_hidden_layers": 1}, r"unexpected: model.layers.1"),
    "other heads": ("granite", {"num_key_value_heads": 4}, r"k_proj.weight \[16, 32\] instead of \[32, 32\]"),
    "an odd share of a head": ("glm", {"partial_rotary_factor": 0.2, "rope_parameters": None}, "not 3: head_dim"),
    "missing norms of heads (Phi)": ("phi", {"qk_layernorm": True}, r"missing: layers\.0\.self_attn\.q_norm\.weight"),
    "missing norms of heads (StableLM)": ("stablelm", {"qk_layernorm": True}, r"missing: .*q_norm\.norms\.0\.weight"),
    "missing norms of heads (Cohere)": (
        "cohere",
        {"use_qk_norm": True},
        r"missing: layers\.0\.self_attn\.q_norm\.weight",
    ),
    "norms of heads (MPT)": ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
    "scaled logits (MPT)": ("mpt", {"logit_scale": 0.5}, "logit_scale"),
    "MPT without ALiBi": ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
    "cross attention": ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    "both directions": ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "queries that are scaled by position": (
        "llama-gqa",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
        "'llama_4_scaling_beta' is not supported here",
    ),
    "norms that a checkpoint lacks": ("phi", {"qk_layernorm": True}, "missing: layers.0.self_attn.q_norm.weight"),
    "norms of more heads": (
        "cohere-norms",
        {"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 4},
        r"q_norm.weight \[4, 8\] instead of \[8, 4\]",
    ),
    "no norms after blocks": ("hyperclovax", {"use_post_norm": False}, "use_post_norm"),
    "experts in MiniCPM": ("minicpm", {"num_experts": 8}, "num_experts"),
    "numbers of experts for other layers": ("hunyuan-moe", {"moe_topk": [1, 2, 2]}, "list of 2, one per layer"),
    "a learned activation that is gated": ("arcee", {"hidden_act": "xielu"}, "'hidden_act' is 'xielu', supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_or_is_not_computed_is_refused_in_a_line(case: str, save_checkpoint: Any) -> None:
    variant, changes, message = REFUSED[case]
    folder, _ = checkpoint(save_checkpoint, variant)
    rewrite(folder, **changes)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        load_model(ModelConfig.resolve(folder))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_at_least_thirty_families_are_compared_with_transformers() -> None:
    assert len({architecture for architecture, _ in VARIANTS.values()}) >= 30
