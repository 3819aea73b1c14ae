"""What a model is used for, and files that only models that pool have."""

import json
from pathlib import Path

import pytest

from quire.common.errors import CheckpointError, ConfigError
from quire.config.checkpoint.hf_names import standard_names, stated_values
from quire.config.checkpoint.runners import MODULES_FILE, PoolerConfig, find_runner
from quire.config.hf_config import HFConfig, read_json_list
from quire.config.kv_cache import LatentSpec
from quire.config.model import ModelConfig

DECODER, ENCODER = "LlamaForCausalLM", "BertModel"


@pytest.mark.parametrize(
    ("architecture", "given", "found"),
    [
        (DECODER, ("auto", "auto"), ("generate", "none")),
        (DECODER, ("generate", "none"), ("generate", "none")),
        (DECODER, ("pooling", "auto"), ("pooling", "embed")),
        (DECODER, ("auto", "reward"), ("pooling", "reward")),
        (DECODER, ("auto", "none"), ("generate", "none")),
        (DECODER, ("generate", "auto"), ("generate", "none")),
        (DECODER, ("pooling", "classify"), ("pooling", "classify")),
        (ENCODER, ("auto", "auto"), ("pooling", "none")),
        (ENCODER, ("pooling", "none"), ("pooling", "none")),
    ],
)
def test_the_architecture_says_what_a_model_is_used_for(architecture, given, found, tmp_path: Path) -> None:
    assert find_runner(architecture, tmp_path, *given) == found


def test_a_decoder_with_modules_pools(tmp_path: Path) -> None:
    (tmp_path / MODULES_FILE).write_text("[]")
    assert find_runner(DECODER, tmp_path, "auto", "auto") == ("pooling", "embed")
    assert find_runner(DECODER, tmp_path, "generate", "auto") == ("generate", "none")
    assert find_runner(DECODER, tmp_path, "auto", "none") == ("generate", "none")


@pytest.mark.parametrize(
    ("architecture", "given", "words"),
    [
        (ENCODER, ("generate", "auto"), "does not generate"),
        (ENCODER, ("auto", "embed"), "pools as it is"),
        (DECODER, ("generate", "embed"), "is for pooling"),
        (DECODER, ("pooling", "none"), "must be converted"),
        (DECODER, ("draft", "auto"), "^runner='draft'"),
        (DECODER, ("auto", "draft"), "^convert='draft'"),
    ],
)
def test_what_an_architecture_cannot_be_used_for(architecture, given, words, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        find_runner(architecture, tmp_path, *given)


@pytest.mark.parametrize(
    ("padding", "length"),
    [({"pad_token_id": 1}, 512), ({}, 512), ({"pad_token_id": 0}, 513), ({"pad_token_id": 3}, 510)],
)
def test_positions_of_roberta_begin_behind_the_padding(padding, length) -> None:
    given = {"architectures": ["RobertaModel"], "max_position_embeddings": 514, **padding}
    standard = standard_names(HFConfig(given, "c"))
    assert (standard["max_position_embeddings"], standard.source) == (length, "c")
    assert stated_values(standard) == given, "as it is saved"


def test_positions_of_other_encoders_begin_at_the_first() -> None:
    given = {"architectures": ["BertModel"], "max_position_embeddings": 512, "pad_token_id": 1}
    standard = standard_names(HFConfig(given, "c"))
    assert dict(standard) == stated_values(standard) == given


def test_positions_of_roberta_have_a_number() -> None:
    with pytest.raises(CheckpointError, match=r"^c has no 'max_position_embeddings'"):
        standard_names(HFConfig({"architectures": ["RobertaModel"]}, "c"))


def test_a_list_in_json_must_be_one(tmp_path: Path) -> None:
    file = tmp_path / "modules.json"
    file.write_text(json.dumps([1, "a"]))
    assert read_json_list(file) == [1, "a"]
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="must hold a list"):
        read_json_list(file)


def test_latents_take_one_row_for_each_token() -> None:
    spec = LatentSpec(512, 64, "bfloat16")
    assert (spec.width, spec.block_bytes(16), spec.max_blocks(33, 16, 8)) == (576, 16 * 576 * 2, 3)
    assert spec.with_dtype("bfloat16") == spec
    with pytest.raises(ConfigError, match="int8"):
        spec.with_dtype("int8")


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, None),
        ({"pooling_type": "CLS"}, "first"),
        ({"seq_pooling_type": "LAST"}, "last"),
        ({"pooling_type": "MEAN", "tok_pooling_type": "ALL", "dimensions": None, "max_embed_len": None}, "mean"),
    ],
)
def test_a_way_of_pooling_is_chosen_under_vllms_names(given, mode) -> None:
    assert PoolerConfig.read(given).mode == mode


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pooling_type": "STEP"}, r"^pooler_config: pooling_type='STEP' \(allowed: CLS, LAST, MEAN\)"),
        ({"tok_pooling_type": "STEP"}, "'tok_pooling_type' is not supported"),
        ({"pooling_typ": "CLS"}, "'pooling_typ' is not supported, did you mean 'pooling_type'"),
        ({"dimensions": 3}, "'dimensions' is not supported"),
        ({"task": "embedding"}, "task='embedding', did you mean 'embed'"),
        ({"use_activation": "no"}, "use_activation='no': must be true or false"),
        ({"pooling_type": "CLS", "seq_pooling_type": "CLS"}, "give one of them"),
    ],
)
def test_choices_that_quire_does_not_have(given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        PoolerConfig.read(given)


def test_a_model_that_generates_has_no_way_of_pooling() -> None:
    with pytest.raises(ConfigError, match="pooler_config: LlamaForCausalLM generates; give runner='pooling'"):
        ModelConfig.resolve(None, pooler_config={"pooling_type": "MEAN"})
    config = ModelConfig.resolve(None, pooler_config={"pooling_type": "MEAN"}, runner="pooling")
    assert config.pooler_config == PoolerConfig(pooling_type="MEAN")
