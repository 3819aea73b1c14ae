"""How the fields of a request become the engine's params, and which requests are refused on the way."""

import json
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from quire.common.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.server.api.shared.fields import JsonSchemaFormat, Prediction, ResponseFormat, SamplingFields, StreamOptions
from quire.server.api.shared.sampling import check_request, make_params, name_fields, num_choices, structure
from quire.server.http.errors import ApiError

STATE = SimpleNamespace(
    llm=SimpleNamespace(
        default_sampling_params=lambda: SamplingParams(temperature=0.3, top_k=7),
        model_config=SimpleNamespace(vocab_size=10, max_model_len=99),
        pooler=None,
    ),
    args=SimpleNamespace(max_prompts_per_request=3, max_choices_per_request=6),
)
FORM = StructuredOutputsParams(regex="a")


def params(
    *, tenant: str = "", max_tokens: int | None = 5, logprobs: int | None = None, form=None, **fields: object
) -> SamplingParams | BeamSearchParams:
    context = SimpleNamespace(tenant=tenant)
    request = SamplingFields(**fields)
    return make_params(
        STATE, context, request, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form
    )  # fmt: skip


def refusal(call, *arguments, **options) -> ApiError:
    with pytest.raises(ApiError) as raised:
        call(*arguments, **options)
    assert raised.value.status == 400
    return raised.value


def test_omitted_fields_have_the_values_that_the_checkpoint_recommends():
    assert params() == SamplingParams(temperature=0.3, top_k=7, max_tokens=5, output_kind="final_only")


def test_fields_of_the_same_name_are_copied():
    given = {
        "n": 2, "best_of": 3, "temperature": 0.9, "top_p": 0.5, "top_k": 0, "min_p": 0.1, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "repetition_penalty": 1.5, "seed": 4, "min_tokens": 1, "stop": ["x"],
        "stop_token_ids": [3], "include_stop_str_in_output": True, "ignore_eos": True, "prompt_logprobs": 1,
        "bad_words": ["y"], "allowed_token_ids": [1, 2], "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "truncate_prompt_tokens": 4, "cache_salt": "s", "priority": -3,
    }  # fmt: skip
    expected = SamplingParams(**given, max_tokens=None, logprobs=2, output_kind="delta")
    assert params(max_tokens=None, logprobs=2, stream=True, **given) == expected


@pytest.mark.parametrize(
    ("key", "user", "tenant"), [("", None, ""), ("k", None, "k"), ("", "u", "u"), ("k", "u", "k/u")]
)
def test_the_tenant_is_made_of_the_keys_name_and_the_user(key, user, tenant):
    assert params(tenant=key, user=user).tenant == tenant
    assert params(tenant=key, user=user, use_beam_search=True).tenant == tenant


def test_the_keys_of_a_logit_bias_are_token_ids_in_digits():
    assert params(logit_bias={"5": 1.0, "0": -2}).logit_bias == {5: 1.0, 0: -2}
    assert params(logit_bias={"9" * 18: 1.0}).logit_bias == {int("9" * 18): 1.0}
    assert params(logit_bias={}).logit_bias == {}
    for key in ("", "-1", "a", " 5", "٣", "²", "9" * 19):
        error = refusal(params, logit_bias={key: 1.0})
        assert error.param == "logit_bias"
        assert f"logit_bias[{key!r}]: " in error.message
    assert f"logit_bias[{'x' * 40!r}]: " in refusal(params, logit_bias={"x" * 500: 1.0}).message


def test_a_prediction_is_a_text_in_either_form():
    assert params(prediction="soon").prediction == "soon"
    assert params(prediction=Prediction(type="content", content="soon")).prediction == "soon"
    assert params().prediction is None


FORMS = {
    "guided_json": ({"type": "object"}, {"json": {"type": "object"}, "disable_additional_properties": True}),
    "guided_regex": ("a+", {"regex": "a+"}),
    "guided_choice": (["a", "b"], {"choice": ["a", "b"]}),
    "guided_grammar": ("root ::= 'a'", {"grammar": "root ::= 'a'"}),
    "structured_outputs": (FORM, {"regex": "a"}),
    "response_format": (ResponseFormat(type="json_object"), {"json_object": True}),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_output_can_be_constrained_by_several_fields(name):
    given, expected = FORMS[name]
    assert structure(SamplingFields(**{name: given})) == StructuredOutputsParams(**expected)


def test_the_constraint_that_the_endpoint_chose_is_used():
    assert params(form=FORM).structured_outputs is FORM
    assert params(form=FORM, use_beam_search=True).structured_outputs is FORM
    assert params(guided_regex="b").structured_outputs is None


def test_a_response_format_may_have_a_schema():
    schema = {"type": "string"}
    given = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=schema))
    expected = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert structure(SamplingFields(response_format=given)) == expected
    error = refusal(structure, SamplingFields(response_format=ResponseFormat(type="json_schema")))
    assert error.param == "response_format.json_schema"
    assert error.message == "response_format of type json_schema requires the field json_schema"
    for form in (given, ResponseFormat(type="json_object")):
        error = refusal(structure, SamplingFields(response_format=form, guided_regex="a"))
        assert error.message.startswith("response_format and guided_regex each constrain the output")
        assert error.param == "response_format"
    text = ResponseFormat(type="text", json_schema=JsonSchemaFormat(schema=schema))
    assert structure(SamplingFields(response_format=text)) is None
    assert structure(SamplingFields()) is None


def test_the_objects_of_a_schema_have_the_properties_that_it_names():
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "object"}}}
    expected = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    for fields in ({"response_format": given}, {"guided_json": schema}, {"structured_outputs": {"json": schema}}):
        assert structure(msgspec.convert(fields, SamplingFields)) == expected
    text = StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)
    assert structure(SamplingFields(structured_outputs=text)) == replace(text, disable_additional_properties=True)


def test_the_same_constraint_may_have_its_old_and_its_new_name():
    given = StructuredOutputsParams(grammar='start: "a"')
    assert structure(SamplingFields(structured_outputs=given, guided_grammar=given.grammar)) == given
    names: dict[str, str] = {}
    request = SamplingFields(structured_outputs=given, guided_grammar='start: "b"')
    name_fields(names, request)
    assert names == {}, "an error would name one field twice"
    assert refusal(structure, request).message.startswith("structured_outputs and guided_grammar each constrain")


def test_a_response_format_may_be_a_structural_tag():
    form = {"type": "regex", "pattern": "a"}
    given = ResponseFormat(type="structural_tag", format=form)
    assert structure(SamplingFields(response_format=given)) == StructuredOutputsParams(structural_tag={"format": form})
    parts = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<"]}
    given = ResponseFormat(type="structural_tag", **parts)
    assert structure(SamplingFields(response_format=given)) == StructuredOutputsParams(structural_tag=parts)


def test_two_constraints_are_refused_and_both_named():
    error = refusal(structure, SamplingFields(guided_regex="b", structured_outputs=FORM))
    assert error.param == "structured_outputs"
    assert error.message.startswith("structured_outputs and guided_regex each constrain the output")
    error = refusal(structure, SamplingFields(guided_regex="a", guided_json="{}"))
    assert error.param == "guided_json"


def test_errors_of_a_constraint_name_the_field_that_sets_it():
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format"):
        names = {"prompt": "input"}
        name_fields(names, SamplingFields(**{name: FORMS[name][0]}))
        assert names == {"prompt": "input", "structured_outputs": name}
    names = {"structured_outputs": "text.format"}
    name_fields(names, SamplingFields(guided_regex="a", structured_outputs=FORM))
    assert names == {"structured_outputs": "text.format"}
    names = {}
    name_fields(names, SamplingFields(structured_outputs=FORM))
    assert names == {}


def test_a_beam_search_uses_the_fields_that_it_supports():
    given = {
        "temperature": 0.5, "length_penalty": 2.0, "early_stopping": True, "ignore_eos": True, "stop_token_ids": [3],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "priority": 4,
    }  # fmt: skip
    expected = BeamSearchParams(4, 5, n=3, tenant="k", **given)
    assert params(use_beam_search=True, n=3, best_of=4, tenant="k", **given) == expected
    assert params(use_beam_search=True, n=3, max_tokens=None) == BeamSearchParams(3, 99, n=3)
    assert params(use_beam_search=True) == BeamSearchParams(1, 5, n=1)
    random = {"seed": 1, "top_p": 0.5, "top_k": 3}
    assert params(use_beam_search=True, **random) == BeamSearchParams(1, 5, n=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", "x"), ("prompt_logprobs", 0), ("logit_bias", {}), ("bad_words", []), ("allowed_token_ids", []),
     ("min_tokens", 0), ("min_p", 0.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0),
     ("repetition_penalty", 1.0), ("truncate_prompt_tokens", 1), ("cache_salt", ""), ("prediction", "x")],
)  # fmt: skip
def test_fields_that_a_beam_search_does_not_support_are_refused(name, value):
    error = refusal(params, use_beam_search=True, **{name: value})
    assert error.param == name
    assert error.message.startswith(f"{name} cannot be combined with")


def test_log_probabilities_cannot_be_combined_with_beam_search():
    error = refusal(params, use_beam_search=True, logprobs=0)
    assert error.param == "logprobs"
    assert "cannot be combined with use_beam_search" in error.message


@pytest.mark.parametrize(("n", "expected"), [(None, 1), (1, 1), (5, 5), (0, 0)])
def test_the_default_is_one_choice(n, expected):
    assert num_choices(SamplingFields(n=n)) == expected


@pytest.mark.parametrize(
    ("num_prompts", "fields", "param"),
    [(3, {}, None), (4, {}, "prompt"), (3, {"n": 2}, None), (2, {"n": 3}, None), (3, {"n": 3}, "n"),
     (1, {"n": 6}, None), (1, {"n": 7}, "n"), (1, {"best_of": 7}, "best_of"), (2, {"n": 1, "best_of": 3}, None),
     (1, {"n": 6, "best_of": 2}, None)],
)  # fmt: skip
def test_prompts_and_choices_are_bounded(num_prompts, fields, param):
    if param is None:
        check_request(STATE, SamplingFields(**fields), num_prompts)
        return
    error = refusal(check_request, STATE, SamplingFields(**fields), num_prompts)
    assert error.param == param
    assert ("at most 3 are" if param == "prompt" else "at most 6 are") in error.message


def test_by_default_each_prompt_has_one_sample():
    state = SimpleNamespace(llm=STATE.llm, args=SimpleNamespace(max_prompts_per_request=3, max_choices_per_request=3))
    check_request(state, SamplingFields(), 3)
    assert refusal(check_request, state, SamplingFields(best_of=2), 3).param == "best_of"


def test_the_number_of_prompts_is_one_by_default():
    check_request(STATE, SamplingFields(n=6))
    assert "7 choices" in refusal(check_request, STATE, SamplingFields(n=7)).message
    assert "3 prompts times n=4 are 12 choices" in refusal(check_request, STATE, SamplingFields(n=4), 3).message


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids", "logit_bias"])
def test_more_token_ids_than_the_model_has_are_refused_unchecked(name):
    def given(number: int) -> SamplingFields:
        return SamplingFields(**{name: {str(i): 0.0 for i in range(number)} if name == "logit_bias" else [-1] * number})

    check_request(STATE, given(10))
    error = refusal(check_request, STATE, given(11))
    assert (error.param, error.message) == (name, f"{name} contains 11 token ids, but this model has only 10")


def test_stream_options_need_a_stream():
    options = StreamOptions(include_usage=True)
    check_request(STATE, SamplingFields(stream=True, stream_options=options))
    for stream in (None, False):
        error = refusal(check_request, STATE, SamplingFields(stream=stream, stream_options=options))
        assert error.param == "stream_options"
        assert "stream_options requires stream=true" in error.message
