"""Values of config.json under one name, whatever families call them."""

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.hf_names import standard_names, stated_values
from quire.config.hf_config import HFConfig


def standard(**values):
    return dict(standard_names(HFConfig(values, "config.json")))


def test_names_of_families_are_read_under_one():
    given = {"n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 16, "n_inner": None, "activation_function": "relu"}
    assert standard(**given) == given | {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "hidden_act": "relu",
    }


def test_the_standard_name_counts_where_both_have_a_value():
    assert standard(hidden_size=8, n_embd=16)["hidden_size"] == 8
    assert standard(hidden_size=None, n_embd=16)["hidden_size"] == 16


def test_mpnet_counts_positions_from_the_same_id_whatever_pads():
    for stated in ({}, {"pad_token_id": 0}):
        values = standard(architectures=["MPNetModel"], max_position_embeddings=514, **stated)
        assert (values["pad_token_id"], values["max_position_embeddings"]) == (1, 512)


def test_null_stays_null_where_no_name_has_a_value():
    assert standard(sliding_window=None, hidden_size=None) == {"sliding_window": None, "hidden_size": None}


def test_what_published_configs_leave_out_is_filled_in():
    bloom = standard(architectures=["BloomForCausalLM"])
    assert bloom["max_position_embeddings"] == 2048
    assert standard(architectures=["BloomForCausalLM"], seq_length=64)["max_position_embeddings"] == 64
    assert "max_position_embeddings" not in standard(architectures="BloomForCausalLM")
    assert standard(architectures=["GPTNeoXForCausalLM"])["partial_rotary_factor"] == 0.25
    assert standard(architectures=["GPTNeoXForCausalLM"], rotary_pct=1.0)["partial_rotary_factor"] == 1.0


def test_the_text_part_is_read_and_values_beside_it_count_first():
    nested = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "text_config": {"hidden_size": 8, "tie_word_embeddings": True, "eos_token_id": 1, "num_attention_heads": 2},
    }
    values = standard(**nested)
    assert (values["hidden_size"], values["tie_word_embeddings"], values["eos_token_id"]) == (8, False, 1)
    assert (values["num_attention_heads"], values["num_key_value_heads"]) == (2, 4)
    assert "text_config" not in values
    assert standard(**values) == values, "as a checkpoint that Quire saved"


def test_a_text_part_may_have_been_taken_out():
    saved = {"architectures": ["Gemma3ForConditionalGeneration"], "hidden_size": 8}
    assert standard(**saved, text_config={})["hidden_size"] == 8
    assert standard(**saved)["vocab_size"] == 262208


def test_a_nested_config_without_its_text_part_is_incomplete():
    with pytest.raises(CheckpointError, match=r"config.json has no 'text_config': this checkpoint is incomplete"):
        standard(architectures=["Mistral3ForConditionalGeneration"])


def test_a_text_part_within_the_text_part_is_refused():
    text = {"hidden_size": 8}
    for twice in ({"text_config": text}, text | {"text_config": {}}):
        with pytest.raises(CheckpointError, match=r"config.json: 'text_config' holds another 'text_config', but must"):
            standard(architectures=["Mistral3ForConditionalGeneration"], text_config=twice)


def test_types_of_layers_are_a_list():
    for given in (3, "full_attention", {"0": "full_attention"}, True):
        with pytest.raises(CheckpointError) as raised:
            standard(architectures=["LlamaForCausalLM"], layer_types=given)
        message = f"config.json: 'layer_types' is {str(given)!r}, but must be a list of types of layers"
        assert str(raised.value) == message
    with pytest.raises(CheckpointError, match="'layer_types' is '" + "x" * 80 + "', but"):
        standard(layer_types="x" * 99)
    assert standard(architectures=["LlamaForCausalLM"], layer_types=None)["layer_types"] is None


def test_types_of_layers_are_those_that_quire_has():
    known = ["full_attention", "sliding_attention", "full_attention"]
    assert standard(layer_types=known)["layer_types"] == known
    message = r"^config.json: layer_types \['3', 'a', 'b'\]: supported are full_attention, sliding_attention$"
    with pytest.raises(UnsupportedModelError, match=message):
        standard(layer_types=["b", *known, 3, "a", "b"])


@pytest.mark.parametrize("named", [None, [], [1], "RobertaModel", {"RobertaModel": 1}])
def test_without_the_name_of_an_architecture_values_are_as_they_are(named):
    given = {"architectures": named, "max_position_embeddings": 514}
    assert standard(**given) == stated_values(HFConfig(given, "config.json")) == given
