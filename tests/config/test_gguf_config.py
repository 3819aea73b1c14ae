"""The config.json that a GGUF header stands for."""

import struct
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.gguf.rope import share_of
from quire.config.model import ModelConfig, rope_config
from tests.config.gguf_file import LLAMA, TABLE, Stored, Typed, gguf_bytes, header_of, model_bytes, write_gguf

Q8_0 = 8
MIXTURE = {"llama.expert_count": 8, "llama.expert_used_count": 2}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def resolved(path: Path, keys: dict[str, Any] | None = None, *tensors: Stored) -> ModelConfig:
    path.write_bytes(model_bytes(keys, *tensors))
    return ModelConfig.resolve(path)


def test_the_config_comes_from_the_header(path: Path) -> None:
    config = resolved(path)
    assert (config.path, config.tokenizer_path, config.architecture) == (path, path, "LlamaForCausalLM")
    assert (config.vocab_size, config.max_position_embeddings, config.dtype) == (8, 64, "float32")
    assert (config.eos_token_ids, config.quant_method) == ({2}, None)
    hf = config.hf_config
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    assert sizes.items() <= dict(hf).items()
    assert (hf["num_key_value_heads"], hf["head_dim"], hf["tie_word_embeddings"]) == (1, 8, True)
    assert (hf["rms_norm_eps"], hf["attention_bias"], hf["mlp_bias"]) == (pytest.approx(1e-5), False, False)


@pytest.mark.parametrize(
    ("keys", "tensors", "expected"),
    [
        ({}, [Stored("output.weight")], {"tie_word_embeddings": False}),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 32}, [], {"head_dim": 32}),
        ({"llama.attention.head_count_kv": None}, [], {"num_key_value_heads": 2}),
        ({"llama.attention.head_count_kv": [1, 1]}, [], {"num_key_value_heads": 1}),
        ({}, [Stored("blk.0.attn_q.bias"), Stored("blk.0.ffn_up.bias")], {"attention_bias": True, "mlp_bias": True}),
        ({"llama.attention.sliding_window": 64}, [], {"architectures": ["LlamaForCausalLM"]}),
        ({"llama.attention.sliding_window": 8}, [], {"architectures": ["MistralForCausalLM"], "sliding_window": 8}),
        ({"llama.attention.scale": 8**-0.5, "llama.expert_count": 0}, [], {"head_dim": 8}),
        (MIXTURE | {"llama.attention.sliding_window": 8}, [], {"architectures": ["MixtralForCausalLM"],
         "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False}),
        ({}, [Stored("blk.0.ffn_up.weight", (32, 1), Q8_0, bytes(34))], {"dtype": "bfloat16",
         "quantization_config": {"quant_method": "gguf"}}),
        ({}, [Stored("blk.0.ffn_up.weight", (4, 1), 1, bytes(8))], {"dtype": "bfloat16"}),
        ({"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.padding_token_id": 0}, [], {"bos_token_id": 1,
         "pad_token_id": 0, "eos_token_id": 2}),
    ],
)  # fmt: skip
def test_what_the_header_says_is_in_the_config(
    path: Path, keys: dict[str, Any], tensors: list[Stored], expected: dict[str, Any]
) -> None:
    assert expected.items() <= dict(resolved(path, keys, *tensors).hf_config).items()


def test_float16_models_compute_in_bfloat16(path: Path) -> None:
    write_gguf(path, LLAMA, [TABLE._replace(type=1, data=bytes(256))])
    assert (ModelConfig.resolve(path).checkpoint_dtype, ModelConfig.resolve(path).dtype) == ("float16", "bfloat16")


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_the_other_architectures_have_keys_of_their_own(path: Path, name: str) -> None:
    keys = {key.replace("llama", name): value for key, value in LLAMA.items()} | {"general.architecture": name}
    window = {f"{name}.attention.sliding_window": 8}
    bias = Stored("blk.0.attn_q.bias", (15,), 0, bytes(60))  # not reordered, so that its length does not matter
    write_gguf(path, keys | window, [TABLE, bias])
    config = ModelConfig.resolve(path)
    assert config.architecture == f"{name.title()}ForCausalLM"
    assert config.hf_config["attention_bias"] == (name == "qwen3")
    assert (config.hf_config["use_sliding_window"], config.hf_config["max_window_layers"]) == (True, 0)
    assert len(open_checkpoint(path).tensors) == 2


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 8}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
         {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
          "llama.rope.scaling.original_context_length": 16, "llama.rope.scaling.yarn_beta_fast": 16.0,
          "llama.rope.scaling.yarn_beta_slow": 2.0},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0,
          "beta_slow": 2.0}),
    ],
)  # fmt: skip
def test_rope_parameters(path: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected.items() <= dict(rope_config(resolved(path, keys).hf_config)).items()


def table(name: str, *values: float) -> Stored:
    return Stored(name, (len(values),), 0, struct.pack(f"<{len(values)}f", *values))


def test_rope_tables_divide_the_frequencies(path: Path) -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    rope = rope_config(resolved(path, {}, table("rope_freqs.weight", *factors)).hf_config)
    assert (rope["rope_type"], rope["attention_factor"]) == ("longrope", 1.0)
    assert rope["short_factor"] == rope["long_factor"] == list(factors)
    keys = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.original_context_length": 32}
    keys |= {"llama.rope.scaling.attn_factor": 1.25}
    tables = table("rope_factors_long.weight", *factors), table("rope_factors_short.weight", 1.0, 1.0, 1.0, 2.0)
    rope = rope_config(resolved(path, keys, *tables).hf_config)
    assert (rope["long_factor"], rope["short_factor"]) == (list(factors), [1.0, 1.0, 1.0, 2.0])
    assert (rope["attention_factor"], rope["original_max_position_embeddings"]) == (1.25, 32)


@pytest.mark.parametrize(
    ("tensor", "keys", "match", "error"),
    [
        (table("rope_freqs.weight", 1.0), {}, r"must be float32 \[4\], not float32 \[1\]", CheckpointError),
        (table("rope_factors_long.weight", *[1.0] * 4), {}, "the other table is missing", CheckpointError),
        (table("rope_freqs.weight", *[1.0] * 4), {"llama.rope.scaling.type": "yarn"}, "together with rope_freqs",
         UnsupportedModelError),
        (table("rope_freqs.weight", *[1.0] * 4), {"llama.rope.scaling.factor": 2.0}, "together with rope_freqs",
         UnsupportedModelError),
    ],
)  # fmt: skip
def test_rope_tables_that_do_not_fit_are_refused(
    path: Path, tensor: Stored, keys: dict[str, Any], match: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=match):
        resolved(path, keys, tensor)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (
            {"general.architecture": "bert"},
            r"architecture 'bert' are not supported \(supported: apertus, .*, starcoder2\)",
        ),
        (MIXTURE | {"llama.expert_gating_func": 2}, "llama.expert_gating_func is 2: not supported"),
        (MIXTURE | {"llama.expert_shared_count": 1}, "llama.expert_shared_count is 1: not supported"),
        (
            {"general.architecture": "qwen2"}
            | {key.replace("llama.", "qwen2."): value for key, value in (LLAMA | MIXTURE).items()
               if key.startswith("llama.")},
            "qwen2.expert_count is 8: mixtures of experts of this architecture",
        ),
        ({"llama.attention.causal": False}, "encoders are not supported"),
        ({"llama.attention.value_length": 16}, "must equal the length of keys, 8"),
        ({"llama.rope.dimension_count": 4}, "must equal the head's size, 8"),
        ({"llama.logit_scale": 2.0}, "this scale is not supported"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv is 8.0: not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "and longrope with its tables"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, "only 1 is supported"),
    ],
)  # fmt: skip
def test_what_would_be_computed_wrongly_is_refused(path: Path, keys: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        resolved(path, keys)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"general.architecture": None}, "has no 'general.architecture': it does not hold a model"),
        ({"llama.block_count": None}, "has no 'llama.block_count'"),
        ({"llama.block_count": [1, 2]}, r"'llama.block_count' is \[1, 2\], but must be an integer"),
        ({"llama.feed_forward_length": ["a"]}, "'llama.feed_forward_length' is Array"),
        ({"llama.attention.head_count": 0}, "'llama.attention.head_count' is 0"),
    ],
)
def test_missing_and_malformed_values_are_named(path: Path, keys: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        resolved(path, keys)


@pytest.mark.parametrize("tensors", [[], [Stored("token_embd.weight")]])
def test_a_model_needs_a_token_table(path: Path, tensors: list[Stored]) -> None:
    write_gguf(path, LLAMA, tensors)
    with pytest.raises(CheckpointError, match=r"has no 'token_embd\.weight' with two dimensions"):
        ModelConfig.resolve(path)


def test_the_tokens_that_end_an_answer_and_the_sampling_defaults_are_in_the_header(path: Path) -> None:
    keys = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.tokens": ["<|im_end|>", "<|endoftext|>", "</s>", "a"],
        "tokenizer.ggml.token_type": [Typed(5, 3), Typed(5, 1), Typed(5, 3), Typed(5, 1)],
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    config = resolved(path, keys)
    assert config.eos_token_ids == {0, 2, 5}
    assert dict(config.generation_config) == {"eos_token_id": [0, 2, 5], "temperature": 0.5, "top_k": 20}
    assert resolved(path, {"tokenizer.ggml.eos_token_id": None}).eos_token_ids == frozenset()


def test_overrides_replace_what_the_header_says(path: Path) -> None:
    path.write_bytes(model_bytes())
    config = ModelConfig.resolve(
        path, hf_overrides={"max_position_embeddings": 32}, override_generation_config={"eos_token_id": 7}
    )
    assert (config.max_position_embeddings, config.eos_token_ids) == (32, {7})


# What other architectures have


def values_of(path: Path, architecture: str, *tensors: Stored, **keys: Any) -> dict[str, Any]:
    """The config of a file of this architecture, with these of its keys (`__` for a dot)."""
    path.write_bytes(gguf_bytes(header_of(architecture, **keys), [TABLE, *tensors]))
    return dict(ModelConfig.resolve(path).hf_config)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("cohere2", {"attention__sliding_window": 8, "block_count": 4}, [SLIDING] * 3 + [FULL]),
        ("cohere2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": 1}, [FULL, FULL]),
        ("olmo2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": [False, True]},
         [FULL, SLIDING]),
        ("olmo2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True, True]},
         [SLIDING, SLIDING]),
        ("exaone4", {}, [FULL, FULL]),
        ("gemma2", {}, [SLIDING, FULL]),
    ],
)  # fmt: skip
def test_layers_with_a_window(path: Path, architecture: str, keys: dict[str, Any], expected: list[str]) -> None:
    assert values_of(path, architecture, **keys)["layer_types"] == expected


def test_a_window_may_make_it_another_class(path: Path) -> None:
    assert values_of(path, "olmo2")["architectures"] == ["Olmo2ForCausalLM"]
    values = values_of(path, "olmo2", attention__sliding_window=8)
    assert (values["architectures"], values["model_type"]) == (["Olmo3ForCausalLM"], "olmo3")


def test_layers_with_a_window_may_be_rotated_otherwise(path: Path) -> None:
    keys = {"attention__sliding_window": 8, "rope__freq_base": 1e6, "rope__scaling__type": "linear"}
    rope = values_of(path, "gemma3", **keys, rope__scaling__factor=8.0)["rope_parameters"]
    assert (rope[FULL]["rope_theta"], rope[FULL]["factor"]) == (1e6, 8.0)
    assert rope[SLIDING] == {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    rope = values_of(path, "gemma3", **keys, rope__scaling__factor=8.0, rope__freq_base_swa=5e4)["rope_parameters"]
    assert rope[SLIDING]["rope_theta"] == 5e4


def test_every_part_of_a_head_may_be_rotated() -> None:
    parts = [(part, head_dim) for head_dim in range(2, 257, 2) for part in range(2, head_dim + 1, 2)]
    assert [(part, head_dim) for part, head_dim in parts if int(head_dim * share_of(part, head_dim)) != part] == []


@pytest.mark.parametrize(("num_layers", "expected"), [(2, 8), (46, 5)])
def test_the_largest_gemma_has_another_scale(path: Path, num_layers: int, expected: int) -> None:
    keys = {"block_count": num_layers, "attention__head_count": 3, "attention__key_length": 8}
    keys |= {"attention__value_length": 8, "attention__head_count_kv": 3}
    assert values_of(path, "gemma2", **keys)["query_pre_attn_scalar"] == expected


def test_a_part_of_the_header_may_be_in_a_section(path: Path) -> None:
    values = values_of(path, "mpt", attention__max_alibi_bias=6.0, attention__clamp_kqv=2.0)
    assert values["attn_config"] == {"alibi_bias_max": 6.0, "clip_qkv": 2.0}


@pytest.mark.parametrize(
    ("architecture", "keys", "match"),
    [
        ("mistral3", {"attention__temperature_scale": 0.1}, "mistral3.attention.temperature_scale is 0.1"),
        ("qwen2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": 2}, "for this architecture"),
        ("llama", {"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("granitemoe", {"expert_count": 2, "expert_used_count": 1, "expert_shared_feed_forward_length": 8},
         "expert_shared_feed_forward_length is 8: not supported"),
        ("glm4moe", {"expert_count": 2, "expert_used_count": 1, "expert_gating_func": 1}, "expert_gating_func is 1"),
        ("olmo2", {"logit_scale": 2.0}, "this scale is not supported"),
        ("granite", {"rope__scaling__finetuned": False}, "finetuned is False: only True is supported"),
        ("falcon", {"attention__max_alibi_bias": 8.0}, "max_alibi_bias is 8.0"),
        ("command-r", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)  # fmt: skip
def test_what_another_architecture_would_not_compute_is_refused(
    path: Path, architecture: str, keys: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        values_of(path, architecture, **keys)


def test_a_constant_of_the_activation_with_another_value_is_refused(path: Path) -> None:
    numbers = {"xielu.alpha_n": [0.5, 0.5], "xielu.alpha_p": [0.5, 0.5], "xielu.beta": [0.25, 0.25]}
    path.write_bytes(gguf_bytes(header_of("apertus") | numbers, [TABLE]))
    with pytest.raises(UnsupportedModelError, match=r"xielu.beta is 0.25, supported is 0.5"):
        open_checkpoint(path)
