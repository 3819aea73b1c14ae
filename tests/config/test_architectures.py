"""Which architecture a config.json names, and what is said of one that Quire does not run."""

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.architectures import MODELS, supported_architecture, unsupported
from quire.config.hf_config import HFConfig

REFUSED = "is not supported: Quire has no class for it"
LISTED = "`quire models` lists those that it has"


@pytest.mark.parametrize("name", MODELS)
def test_a_supported_architecture_is_the_first_that_is_named(name):
    assert supported_architecture(HFConfig({"architectures": [name, "Other"], "model_type": "gpt2"}, "c")) == name


@pytest.mark.parametrize(
    ("values", "name", "listed"),
    [
        ({"architectures": ["CTRLLMHeadModel"], "model_type": "llama"}, "CTRLLMHeadModel", LISTED),
        ({"model_type": "ctrl"}, "ctrl", LISTED),
        (
            {"architectures": ["MixtralForCausalLm"]},
            "MixtralForCausalLm",
            f"{LISTED}; closest: 'MixtralForCausalLM', 'MistralForCausalLM'",
        ),
        ({"model_type": "deberta_v3"}, "deberta_v3", f"{LISTED}; closest: .*'DebertaV2"),
    ],
)
def test_an_unsupported_architecture_is_named_with_its_file_and_the_closest_ones(values, name, listed):
    with pytest.raises(UnsupportedModelError, match=rf"\({listed}.*\)$") as raised:
        supported_architecture(HFConfig(values, "a/config.json"))
    message = str(raised.value)
    assert message.startswith(f"a/config.json: the architecture {name!r} {REFUSED} (")
    assert len(message) < 300
    assert ("closest" in message) == ("closest" in listed)


@pytest.mark.parametrize("values", [{"architectures": ["OwnForCausalLM"]}, {"model_type": "own"}])
def test_code_that_comes_with_a_checkpoint_is_said_to_be_never_run(values):
    with pytest.raises(UnsupportedModelError) as raised:
        supported_architecture(HFConfig(values | {"auto_map": {"AutoModel": "a.B"}}, "c"))
    assert f"{REFUSED}, and code that comes with a checkpoint (auto_map) is never run ({LISTED})" in str(raised.value)


@pytest.mark.parametrize("named", [None, [], [5], "LlamaForCausalLM", {}])
@pytest.mark.parametrize("model_type", [None, "llama", "gpt_neox", 5])
def test_a_config_that_names_none_is_malformed(named, model_type):
    with pytest.raises(CheckpointError) as raised:
        supported_architecture(HFConfig({"architectures": named, "model_type": model_type}, "a/config.json"))
    expected = f"a/config.json: 'architectures' is {named!r}, but must be a list that names the model's class"
    assert (type(raised.value), str(raised.value)) == (CheckpointError, expected)


def test_a_name_without_end_is_cut():
    assert str(unsupported("x" * 10**6)) == f"the architecture {'x' * 80!r} {REFUSED} ({LISTED})"
