"""Which architecture a config.json names, and what is said of one that Quire does not run."""

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.architectures import MODELS, POOLING_MODELS, supported_architecture, unsupported
from quire.config.hf_config import HFConfig

KNOWN = ", ".join(sorted(MODELS | POOLING_MODELS))
SUPPORTED = f"is not supported (supported: {KNOWN}; a checkpoint's own Python code is never run)"


@pytest.mark.parametrize("name", MODELS)
def test_a_supported_architecture_is_the_first_that_is_named(name):
    assert supported_architecture(HFConfig({"architectures": [name, "Other"], "model_type": "gpt2"}, "c")) == name


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"architectures": ["CTRLLMHeadModel"], "model_type": "llama"}, "CTRLLMHeadModel"),
        ({"model_type": "ctrl"}, "ctrl"),
    ],
)
def test_an_unsupported_architecture_is_named_with_its_file(values, name):
    with pytest.raises(UnsupportedModelError) as raised:
        supported_architecture(HFConfig(values, "a/config.json"))
    assert str(raised.value) == f"a/config.json: the architecture {name!r} {SUPPORTED}"


@pytest.mark.parametrize("named", [None, [], [5], "LlamaForCausalLM", {}])
@pytest.mark.parametrize("model_type", [None, "llama", "gpt_neox", 5])
def test_a_config_that_names_none_is_malformed(named, model_type):
    with pytest.raises(CheckpointError) as raised:
        supported_architecture(HFConfig({"architectures": named, "model_type": model_type}, "a/config.json"))
    expected = f"a/config.json: 'architectures' is {named!r}, but must be a list that names the model's class"
    assert (type(raised.value), str(raised.value)) == (CheckpointError, expected)


def test_a_name_without_end_is_cut():
    assert str(unsupported("x" * 200)) == f"the architecture {'x' * 80!r} {SUPPORTED}"
