"""speculative_config: vLLM's fields, what they mean here, and what is refused."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from quire import CheckpointError, ConfigError, EngineArgs
from quire.config import speculative
from quire.config.model import ModelConfig
from quire.config.speculative import METHODS, SpeculativeConfig, draft_model


def read(**given: object) -> SpeculativeConfig:
    return SpeculativeConfig.read(given)


def test_without_fields_drafts_are_looked_up_wherever_they_may_be_and_only_where_it_pays() -> None:
    config = read()
    assert (config.method, config.is_adaptive, config.num_speculative_tokens) == ("auto", True, 8)
    assert config == SpeculativeConfig()
    assert EngineArgs().resolve().speculative == config


def test_fields_have_vllms_names() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 3}
    expected = SpeculativeConfig("ngram", 5, 3, 4)
    assert read(**given) == EngineArgs(speculative_config=given).resolve().speculative == expected
    assert read(method="suffix", suffix_decoding_max_tree_depth=24).max_match == 24
    assert not read(adaptive=False).is_adaptive


def test_a_draft_model_may_be_quantized() -> None:
    given = {"model": "quire-draft", "quantization": "int8", "draft_tensor_parallel_size": 1}
    draft = EngineArgs(speculative_config=given).resolve().draft
    assert draft is not None
    assert draft.quantization == "int8"
    assert read(model="a/b", revision="v1").revision == "v1"
    for wrong, said in (
        ({"quantization": "int8"}, "quantization is for a draft model, and there is none"),
        ({"method": "ngram", "revision": "v1"}, "revision is for a draft model"),
        (
            {"model": "quire-draft", "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size=2: only 1 is supported",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            read(**wrong)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "quire-draft", "quantization": "int9"}, "quantization='int9', did you mean 'int8'"),
        ({"model": "/nowhere"}, "there is no folder or file '/nowhere'"),
        ({"model": "/nowhere", "method": "draft_model"}, "there is no folder or file '/nowhere'"),
    ],
)
def test_what_is_wrong_with_a_draft_model_is_said_of_it(given: dict[str, str], said: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=f"^speculative_config: {said}"):
        EngineArgs(speculative_config=given).resolve()


def test_null_is_as_if_nothing_was_given() -> None:
    assert read(method=None, num_speculative_tokens=None, model=None) == read()


def test_a_method_alone_may_be_given() -> None:
    for given, method in ((False, "off"), ("off", "off"), ("ngram", "ngram")):
        assert EngineArgs(speculative_config=given).resolve().speculative.method == method
    with pytest.raises(ConfigError, match="speculative_config: method='onn'"):
        EngineArgs(speculative_config="onn").resolve()


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (2, 16)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_max": 5}, (2, 5)),
        ({"prompt_lookup_min": 3}, (3, 16)),
        ({"prompt_lookup_min": 17}, (17, 17)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 3}, (1, 3)),
    ],
)
def test_of_two_lengths_the_one_that_is_not_given_follows_the_other(given: dict[str, int], lengths: tuple) -> None:
    config = read(**given)
    assert (config.min_match, config.max_match) == lengths


def test_fields_that_bound_what_is_tried_have_no_effect(caplog, monkeypatch) -> None:
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    fields = {"suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.3}
    assert read(method="suffix", suffix_decoding_max_cached_requests=9, **fields) == read(method="suffix")
    assert read(**fields, method="suffix") == read(method="suffix"), "those behind them have"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_speculative_token": 3}, "unknown field 'num_speculative_token', did you mean 'num_speculative_tokens'"),
        ({"tokens": 3}, r"unknown field 'tokens' \(allowed: method, model, num_speculative_tokens, prompt_lookup_min"),
        (
            {"method": "medusa"},
            r"method='medusa' \(allowed: auto, suffix, ngram, prediction, forced, draft_model, eagle, eagle3, mtp, off",
        ),
        ({"method": "ngrams"}, "did you mean 'ngram'"),
        ({"method": 3}, "method=3 must be of the type str"),
        ({"model": ""}, "model='' must not be empty; leave it out to have none"),
        ({"method": "draft_model", "model": ""}, "model='' must not be empty; leave it out to have none"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True must be of the type int"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens=2.0 must be of the type int"),
        ({"adaptive": 1}, "adaptive=1 must be of the type bool"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must be from 1 to 32"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens=33 must be from 1 to 32"),
        *(({"method": method}, f"method='{method}' needs a model$") for method in ("draft_model", "eagle", "eagle3")),
        ({"method": "ngram", "model": "m"}, "method='ngram' takes no model .draft_model, eagle, eagle3, mtp do.$"),
        ({"method": 0}, "method=0 must be of the type str"),
        ({"method": True}, "method=True must be of the type str"),
        ({"adaptive": False, "model": False}, "model=False must be of the type str"),
        *(
            ({name: wrong}, f"^speculative_config: {name}={wrong} must be from 1 to 65536$")
            for name in ("prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth")
            for wrong in (-1, 0, 65537, 10**30)
        ),
        ({"num_speculative_tokens": 10**30}, f"num_speculative_tokens={10**30} must be from 1 to 32"),
        ({"draft_tensor_parallel_size": 10**30}, "draft_tensor_parallel_size=1000.*: only 1 is supported"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4 must be at most prompt_lookup_max=3$"),
        (
            {"suffix_decoding_max_tree_depth": 9, "prompt_lookup_max": 3},
            "prompt_lookup_max and suffix_decoding_max_tree_depth mean the same, but are 9 and 3; give one of them$",
        ),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**given)


def test_what_is_no_mapping_of_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config: unknown field 1 \(allowed: method, model, "):
        SpeculativeConfig.read({1: 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"^speculative_config=\['ngram'\]: must be dict or None, not list$"):
        EngineArgs(speculative_config=["ngram"]).resolve()


def test_the_first_and_last_number_of_drafts_are_allowed() -> None:
    assert [read(num_speculative_tokens=n).num_speculative_tokens for n in (1, 32)] == [1, 32]


def test_names_of_one_length_may_agree_and_lengths_are_bounded() -> None:
    assert read(prompt_lookup_max=9, suffix_decoding_max_tree_depth=9).max_match == 9
    assert read(prompt_lookup_min=2**16).max_match == 2**16


def test_off_without_quotes_is_off() -> None:
    """YAML reads it as false. The log of the configuration shows what was meant."""
    args = EngineArgs(**yaml.safe_load("{speculative_config: {method: off, num_speculative_tokens: 3}}"))
    assert args.speculative_config == {"method": "off", "num_speculative_tokens": 3}
    assert args.resolve().speculative == SpeculativeConfig("off", 3)
    args = EngineArgs(**yaml.safe_load("speculative_config: off"))
    assert args.speculative_config == {"method": "off"}
    assert args.resolve().speculative == SpeculativeConfig("off")
    with pytest.raises(ConfigError, match=r"^speculative_config=True: must be dict or None, not bool$"):
        EngineArgs(speculative_config=True).resolve()


def test_what_is_off_has_no_drafters() -> None:
    assert [method for method, sources in METHODS.items() if not sources] == ["off"]
    assert read(method="draft_model", model="quire-draft").model == "quire-draft"


@pytest.mark.parametrize("name", ["deepseek_mtp", "qwen3_next_mtp", "mtp"])
def test_vllms_names_for_single_families_mean_their_kind_of_head(name: str) -> None:
    assert read(method=name).method == "mtp"


@pytest.mark.parametrize(
    ("given", "max_num_seqs", "max_num_batched_tokens", "num_rows"),
    [
        ({}, 2, 1000, 16),
        ({"num_speculative_tokens": 3}, 2, 1000, 6),
        ({}, 20, 1000, 44),
        ({}, 64, 1000, 0),
        ({}, 70, 1000, 0),
        ({}, 2, 10, 9),
        ({"method": "off"}, 2, 1000, 0),
    ],
)
def test_drafts_have_rows_beside_those_of_all_sequences(
    given: dict[str, Any], max_num_seqs: int, max_num_batched_tokens: int, num_rows: int
) -> None:
    assert read(**given).num_rows(max_num_seqs, max_num_batched_tokens) == num_rows


# The draft model


@pytest.fixture
def model() -> ModelConfig:
    return dataclasses.replace(EngineArgs(dtype="bfloat16").resolve().model, max_model_len=50)


class Files:
    """Stands for the checkpoints that are looked at."""

    def __init__(self, head: object = None, max_context_len: int = 99) -> None:
        self.head, self.max_context_len = head, max_context_len
        self.heads: list[tuple[object, ...]] = []
        self.models: list[tuple[object, ...]] = []

    def resolve_head(self, *given: object) -> object:
        self.heads.append(given)
        return self.head

    def resolve(self, *given: object, **named: object) -> ModelConfig:
        self.models.append((*given, named))
        return dataclasses.replace(EngineArgs().resolve().model, max_context_len=self.max_context_len)


def drafting_model(
    monkeypatch: pytest.MonkeyPatch, files: Files, model: ModelConfig, has_method: bool, /, **given: object
) -> ModelConfig | None:
    monkeypatch.setattr(speculative, "resolve_head", files.resolve_head)
    monkeypatch.setattr(speculative, "ModelConfig", SimpleNamespace(resolve=files.resolve))
    return draft_model(model, read(**given), has_method)


@pytest.mark.parametrize(("max_context_len", "expected"), [(99, 50), (20, 20)])
def test_a_draft_model_computes_as_the_model_does_up_to_the_shorter_context(
    model: ModelConfig, max_context_len: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(max_context_len=max_context_len)
    given = {"method": "draft_model", "model": "a/b", "quantization": "int8", "revision": "v1"}
    found = drafting_model(monkeypatch, files, model, True, **given)
    named = {"dtype": "bfloat16", "quantization": "int8", "revision": "v1", "runner": "generate"}
    assert files.models == [("a/b", named)]
    assert files.heads == [], "the method says what the files are"
    assert found is not None
    assert found.max_model_len == expected


@pytest.mark.parametrize(
    ("given", "has_method", "asked"),
    [
        ({"model": "a/b"}, False, "draft_model"),
        ({"method": "eagle3", "model": "a/b"}, True, "eagle3"),
        ({"method": "mtp"}, True, "mtp"),
    ],
)
def test_files_may_be_a_heads(
    model: ModelConfig, given: dict[str, str], has_method: bool, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(head=object())
    assert drafting_model(monkeypatch, files, model, has_method, **given) is files.head
    assert files.heads == [(model, given.get("model"), asked if has_method else None)]
    assert files.models == []


def test_files_that_are_no_heads_are_a_models(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    assert drafting_model(monkeypatch, files, model, False, model="a/b") is not None
    assert files.heads == [(model, "a/b", None)]
    assert len(files.models) == 1


def test_what_only_a_draft_model_has_is_refused_of_a_head(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="quantization is for a draft model, and there is none"):
        drafting_model(monkeypatch, Files(head=object()), model, False, model="a/b", quantization="int8")


def test_a_model_that_generates_nothing_has_no_drafts(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pools, files = dataclasses.replace(model, runner="pooling"), Files()
    said = rf"^speculative_config: {model.model} pools and generates nothing \(runner='pooling'\), .*; leave spec"
    drafting = {"method": "mtp"}, {"method": "ngram"}, {"model": "a/b"}, {"num_speculative_tokens": 3}
    for given in drafting:
        with pytest.raises(ConfigError, match=said):
            drafting_model(monkeypatch, files, pools, "method" in given, **given)
    for allowed in ({}, {"method": "off"}, {"method": "auto"}):
        assert drafting_model(monkeypatch, files, pools, "method" in allowed, **allowed) is None
    assert files.heads == files.models == []
