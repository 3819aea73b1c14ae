"""speculative_config: vLLM's fields, what they mean here, and what is refused."""

import pytest

from quire import ConfigError, EngineArgs
from quire.config.speculative import METHODS, SpeculativeConfig


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
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True must be of the type int"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens=2.0 must be of the type int"),
        ({"adaptive": 1}, "adaptive=1 must be of the type bool"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must be from 1 to 32"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens=33 must be from 1 to 32"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min=0 must be 1 or more, and at most prompt_lookup_max=16"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_min=1 must be 1 or more, and at most prompt_lookup_max=0"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4 must be 1 or more, and at most"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**given)


def test_the_first_and_last_number_of_drafts_are_allowed() -> None:
    assert [read(num_speculative_tokens=n).num_speculative_tokens for n in (1, 32)] == [1, 32]


def test_what_is_off_has_no_drafters() -> None:
    assert [method for method, sources in METHODS.items() if not sources] == ["off"]
    assert read(method="draft_model", model="quire-draft").model == "quire-draft"
