"""Whose modules run a checkpoint: Quire's, or those of transformers where it is installed and has the class."""

import sys

import pytest

from quire.common.errors import ConfigError, UnsupportedModelError
from quire.config.args import EngineArgs
from quire.config.checkpoint.library import implementation, library_config
from quire.config.hf_config import HFConfig

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
BITNET = {"architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "hidden_size": 64}
BITNET |= {"num_hidden_layers": 2, "num_attention_heads": 4}
MISSING = "pip install 'quire\\[transformers\\]'"


def chosen(values: dict, model_impl: str = "auto") -> tuple[str, str]:
    return implementation(HFConfig(values, "config.json"), model_impl)[:2]


@pytest.mark.parametrize("model_impl", ["auto", "quire", "vllm"])
def test_a_class_of_quire_is_preferred(model_impl):
    assert chosen(LLAMA, model_impl) == ("LlamaForCausalLM", "quire")


def test_transformers_runs_what_is_asked_for_or_what_quire_has_no_class_for():
    assert chosen(LLAMA, "transformers") == ("LlamaForCausalLM", "transformers")
    assert chosen(BITNET) == ("BitNetForCausalLM", "transformers")


@pytest.mark.parametrize("model_impl", ["quire", "vllm"])
def test_nothing_else_runs_where_quire_is_asked_for(model_impl):
    with pytest.raises(UnsupportedModelError, match=r"'BitNetForCausalLM' is not supported: .*'auto' also tries"):
        chosen(BITNET, model_impl)


def test_another_implementation_is_unknown():
    with pytest.raises(ConfigError, match="model_impl='transformer', did you mean 'transformers'"):
        EngineArgs(model_impl="transformer").resolve()


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not there
    with pytest.raises(UnsupportedModelError, match=f"'BitNetForCausalLM' is not supported: .*{MISSING}"):
        chosen(BITNET)
    with pytest.raises(ConfigError, match=MISSING):
        chosen(BITNET, "transformers")
    assert chosen(LLAMA) == ("LlamaForCausalLM", "quire")


@pytest.mark.parametrize(
    "named",
    [
        {"architectures": ["BitNetForCausalLM"], "model_type": "llama"},
        {"architectures": ["BitNetForCausalLM"]},
        {"architectures": ["BitNetForCausalLM"], "model_type": ["bitnet"]},
        {"architectures": ["BitNetForCausalLM", "Other"], "model_type": "bitnet"},
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
    ],
)
def test_the_class_must_be_the_librarys_for_the_type(named):
    with pytest.raises(UnsupportedModelError, match="has no causal language model") as caught:
        chosen(named)
    assert len(str(caught.value)) < 500
    assert str(caught.value).count("config.json") == 1, "the file is named once"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "state-space models and linear attention"),
        ({"architectures": ["MusicgenForCausalLM"], "model_type": "musicgen"}, "a nested config is not supported"),
    ],
)
def test_classes_that_keep_states_or_are_nested_are_refused(named: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        chosen(named)


def test_the_usual_names_are_filled_in_from_the_librarys_defaults():
    config = implementation(HFConfig(BITNET | {"vocab_size": 99}, "c/config.json"), "auto")[2]
    assert config.source == "c/config.json"
    assert {name: config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")} == {
        "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2,
    }  # fmt: skip
    assert config.size("max_position_embeddings") == 2048
    gpt = {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "n_embd": 48, "n_positions": 77}
    config = implementation(HFConfig(gpt, "config.json"), "auto")[2]
    assert (config["hidden_size"], config["max_position_embeddings"]) == (48, 77)


def test_keys_that_choose_code_do_not_reach_the_library():
    keys = {"attn_implementation": "a/b", "_attn_implementation": "a/b", "_experts_implementation_internal": "a/b"}
    given = BITNET | keys | {"auto_map": {"AutoConfig": "x.Y"}, "quantization_config": {}}
    config = library_config(HFConfig(given, "c"))
    assert config._attn_implementation is None
    assert not any(hasattr(config, name) for name in ("auto_map", "quantization_config"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (BITNET | {"num_hidden_layers": "x"}, "c: transformers refuses it: "),
        (
            BITNET | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "c: rope_type dynamic is not supported through transformers",
        ),
        (
            {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4"},
            "c: a nested config is not supported through transformers",
        ),
    ],
)
def test_configs_that_cannot_run_are_refused(values, message):
    with pytest.raises(UnsupportedModelError, match=message):
        implementation(HFConfig(values, "c"), "transformers")
