"""Every value of the config.json and generation_config.json that a GGUF header stands for."""

from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.gguf.files import GGUFModel, read_gguf
from quire.config.checkpoint.gguf.hf_values import generation_values, hf_values
from tests.config.gguf_file import LLAMA, TABLE, Stored, Typed, header_of, write_gguf

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rope_parameters": {"partial_rotary_factor": 1.0, "rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": pytest.approx(1e-5),
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
MIXTURE = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
}


def model_of(folder: Path, header: dict[str, Any], *tensors: Stored) -> GGUFModel:
    known = {key: value for key, value in header.items() if value is not None}
    return read_gguf(write_gguf(folder / "m.gguf", known, [TABLE, *tensors]))


def values_of(folder: Path, header: dict[str, Any], *tensors: Stored) -> dict[str, Any]:
    values = hf_values(model_of(folder, header, *tensors))
    assert values.source == str(folder / "m.gguf")
    return dict(values)


def test_the_values_of_a_plain_model(tmp_path: Path) -> None:
    assert values_of(tmp_path, LLAMA) == PLAIN


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        ({"llama.block_count": 3, "llama.nextn_predict_layers": 1}, {}),
        ({"llama.attention.head_count_kv": None}, {"num_key_value_heads": 2}),
        ({"llama.attention.key_length": 4, "llama.attention.value_length": 4}, {"head_dim": 4}),
        ({"llama.attention.head_count": 16}, {"num_attention_heads": 16, "head_dim": 1}),
        ({"llama.attention.layer_norm_rms_epsilon": None, "llama.attention.layer_norm_epsilon": 0.5},
         {"layer_norm_eps": 0.5}),
        ({"llama.attention.layer_norm_epsilon": 0.5}, {"layer_norm_eps": 0.5, "rms_norm_eps": pytest.approx(1e-5)}),
        ({"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.padding_token_id": 0},
         {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}),
        ({"llama.attention.scale": 8**-0.5, "llama.logit_scale": 1.0, "llama.residual_scale": 1.0}, {}),
        ({"llama.attention.causal": True, "llama.attention.clamp_kqv": 0.0}, {}),
        ({"llama.attention.sliding_window": 63}, {"architectures": ["MistralForCausalLM"], "model_type": "mistral",
         "sliding_window": 63, "use_sliding_window": True, "max_window_layers": 0}),
        ({"llama.attention.sliding_window": 64}, {}),
        ({"llama.attention.sliding_window": 0}, {}),
        ({f"llama.{key}": value for key, value in EXPERTS.items()},
         MIXTURE | {"architectures": ["MixtralForCausalLM"]}),
        ({f"llama.{key}": value for key, value in EXPERTS.items()}
         | {"llama.expert_feed_forward_length": 40, "llama.expert_gating_func": 1, "llama.expert_shared_count": 0,
            "llama.expert_weights_scale": 1.0, "llama.expert_group_count": 1},
         MIXTURE | {"architectures": ["MixtralForCausalLM"], "moe_intermediate_size": 40}),
    ],
    ids=range(14),
)  # fmt: skip
def test_the_values_of_other_models(keys: dict[str, Any], changed: dict[str, Any], tmp_path: Path) -> None:
    found, expected = values_of(tmp_path, LLAMA | keys), PLAIN | changed
    if "layer_norm_rms_epsilon" in str(keys):
        del expected["rms_norm_eps"]
    if changed.get("head_dim") is not None:
        expected["rope_parameters"] = found["rope_parameters"]
    assert found == expected


def test_tensors_say_what_the_header_does_not(tmp_path: Path) -> None:
    biases = Stored("blk.0.attn_q.bias"), Stored("blk.0.ffn_up.bias"), Stored("output.weight")
    changed = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    assert values_of(tmp_path, LLAMA, *biases) == PLAIN | changed
    blocks = Stored("blk.0.ffn_up.weight", (32, 1), 8, bytes(34))
    changed = {"dtype": "bfloat16", "quantization_config": {"quant_method": "gguf"}}
    assert values_of(tmp_path, LLAMA, blocks) == PLAIN | changed


@pytest.mark.parametrize(
    ("types", "dtype"), [((0, 0), "float32"), ((1, 1), "float16"), ((30, 30), "bfloat16"), ((0, 1), "bfloat16")]
)
def test_the_dtype_is_that_of_all_matrices(types: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    tables = [
        Stored(name, (16, 8), kind, bytes(16 * 8 * (2 if kind else 4))) for name, kind in zip("ab", types, strict=True)
    ]
    tables[0] = tables[0]._replace(name="token_embd.weight")
    path = write_gguf(tmp_path / "m.gguf", LLAMA, [*tables, Stored("blk.0.attn_norm.weight")])
    assert hf_values(read_gguf(path))["dtype"] == dtype


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("gemma2", {"block_count": 3}, {"sliding_window": 4096, "layer_types": [SLIDING, FULL, SLIDING]}),
        ("gemma2", {"attention__sliding_window": 8}, {"sliding_window": 8, "layer_types": [SLIDING, FULL]}),
        ("cohere2", {}, {"sliding_window": None, "layer_types": [FULL, FULL]}),
        ("cohere2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": 2},
         {"sliding_window": 8, "layer_types": [SLIDING, FULL]}),
        ("cohere2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": 0},
         {"sliding_window": 8, "layer_types": [SLIDING, SLIDING]}),
        ("cohere2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": True},
         {"sliding_window": 8, "layer_types": [SLIDING, SLIDING]}),
        ("cohere2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": False},
         {"sliding_window": 8, "layer_types": [FULL, FULL]}),
        ("cohere2", {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True, False, True],
                     "block_count": 3, "nextn_predict_layers": 1},
         {"sliding_window": 8, "layer_types": [SLIDING, FULL]}),
        ("olmo2", {"attention__sliding_window": 8},
         {"sliding_window": 8, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}),
        ("olmo2", {}, {"sliding_window": None, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}),
        ("gemma2", {"block_count": 46, "attention__head_count": 3, "attention__head_count_kv": 3,
                    "attention__key_length": 8, "attention__value_length": 8}, {"query_pre_attn_scalar": 5}),
        ("gemma2", {"attention__key_length": 4, "attention__value_length": 4}, {"query_pre_attn_scalar": 4}),
        ("mpt", {"attention__max_alibi_bias": 6.0, "attention__clamp_kqv": 2.0},
         {"attn_config": {"alibi_bias_max": 6.0, "clip_qkv": 2.0}}),
        ("llama", EXPERTS | {"attention__sliding_window": 8},
         {"architectures": ["MixtralForCausalLM"], "model_type": "llama", "sliding_window": 8}),
        ("granite", {"rope__scaling__finetuned": True}, {"architectures": ["GraniteForCausalLM"]}),
    ],
    ids=range(15),
)  # fmt: skip
def test_what_architectures_have_of_their_own(
    architecture: str, keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = values_of(tmp_path, header_of(architecture, **keys))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.causal": False}, "attention.causal is False: encoders are not supported"),
        ({"attention.value_length": 4}, "attention.value_length is 4: must equal the length of keys, 8"),
        ({"attention.scale": 0.5}, "attention.scale is 0.5: this scale is not supported"),
        ({"logit_scale": 2.0}, "logit_scale is 2.0: this scale is not supported"),
        ({"residual_scale": 0.5}, "residual_scale is 0.5: this scale is not supported"),
        ({"embedding_scale": 2.0}, "embedding_scale is 2.0: this scale is not supported"),
        *(({key: 0.5}, f"{key} is 0.5: not supported") for key in (
            "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "attention.clamp_kqv",
            "attention.max_alibi_bias", "attention.temperature_scale")),
        (EXPERTS | {"expert_gating_func": 2}, "expert_gating_func is 2: not supported"),
        (EXPERTS | {"expert_shared_count": 1}, "expert_shared_count is 1: not supported"),
        (EXPERTS | {"expert_weights_scale": 2.0}, "expert_weights_scale is 2.0: not supported"),
        (EXPERTS | {"expert_group_count": 2}, "expert_group_count is 2: not supported"),
        (EXPERTS | {"expert_shared_feed_forward_length": 8}, "expert_shared_feed_forward_length is 8: not supported"),
    ],
)  # fmt: skip
def test_what_would_be_computed_as_if_it_were_not_there_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    header = LLAMA | {f"llama.{key}": value for key, value in keys.items()}
    with pytest.raises(UnsupportedModelError, match=rf"m\.gguf: llama\.{message}$"):
        values_of(tmp_path, header)


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("qwen2", EXPERTS, "qwen2.expert_count is 4: mixtures of experts of this architecture are not supported"),
        ("granite", {"rope__scaling__finetuned": False}, "finetuned is False: only True is supported"),
        (
            "qwen2",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": 2},
            "attention.sliding_window_pattern is 2: not supported for this architecture",
        ),
    ],
)
def test_what_another_architecture_does_not_compute_is_refused(
    architecture: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{message}$"):
        values_of(tmp_path, header_of(architecture, **keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.attention.head_count": 17}, "m.gguf: 17 attention heads are more than the width 16$"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "has no 'llama.attention.layer_norm_rms_epsilon'"),
        ({"llama.feed_forward_length": None}, "has no 'llama.feed_forward_length'"),
        ({"llama.context_length": None}, "has no 'llama.context_length'"),
        ({"llama.expert_count": 4}, "has no 'llama.expert_used_count'"),
    ],
)
def test_values_that_are_missing_or_malformed(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        values_of(tmp_path, LLAMA | keys)


def test_a_pattern_of_windows_has_a_value_for_each_layer(tmp_path: Path) -> None:
    keys = {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True, False, True]}
    with pytest.raises(CheckpointError, match=r"m\.gguf: cohere2\.attention.sliding_window_pattern has 3 values for 2"):
        values_of(tmp_path, header_of("cohere2", **keys))


@pytest.mark.parametrize("tensors", [[], [Stored("token_embd.weight")]])
def test_a_token_table_has_two_dimensions(tensors: list[Stored], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors)
    with pytest.raises(CheckpointError, match=r"m\.gguf has no 'token_embd\.weight' with two dimensions: incomplete$"):
        hf_values(read_gguf(path))


# generation_config.json

TOKENS = ["<|im_end|>", "<|endoftext|>", "</s>", "a", "<|eot_id|>"]
KINDS = [Typed(5, kind) for kind in (3, 1, 3, 3, 3)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"eos_token_id": [2]}),
        ({"tokenizer.ggml.eos_token_id": None}, {}),
        ({"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}, {"eos_token_id": [2, 5, 7]}),
        ({"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": KINDS}, {"eos_token_id": [0, 2, 4]}),
        ({"tokenizer.ggml.tokens": TOKENS}, {"eos_token_id": [2]}),
        ({"tokenizer.ggml.token_type": KINDS}, {"eos_token_id": [2]}),
        ({"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": KINDS[:1]}, {"eos_token_id": [0, 2]}),
        (
            {
                "general.sampling.temp": 0.5,
                "general.sampling.top_k": 20,
                "general.sampling.top_p": 0.25,
                "general.sampling.min_p": 0.125,
                "general.sampling.penalty_repeat": 1.5,
                "general.sampling.other": 1,
            },
            {
                "eos_token_id": [2],
                "temperature": 0.5,
                "top_k": 20,
                "top_p": 0.25,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
            },
        ),
    ],
    ids=range(8),
)
def test_what_ends_an_answer_and_how_to_sample(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    values = generation_values(model_of(tmp_path, LLAMA | keys))
    assert (dict(values), values.source) == (expected, str(tmp_path / "m.gguf"))
