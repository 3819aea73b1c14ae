"""Converts a request's fields to the engine's parameters, for all endpoints."""

from typing import Any

from msgspec.structs import replace

from quire.common.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.server.api.shared.fields import Prediction, ResponseFormat, SamplingFields
from quire.server.http.errors import invalid
from quire.server.http.state import RequestContext
from quire.server.models.served_model import ServedModel

_OTHER_MEANING = {"max_tokens", "logit_bias", "structured_outputs", "logprobs", "prediction"}
_SAME = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in SamplingFields.__struct_fields__ and name not in _OTHER_MEANING
)
"""Fields with the same name and meaning in both."""
_NOT_WITH_BEAMS = (
    "stop", "prompt_logprobs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "truncate_prompt_tokens", "cache_salt",
    "prediction",
)  # fmt: skip
"""Fields that beam search does not support. Fields that only affect random draws are allowed."""
_POOLING_PATHS = {"classify": "/classify", "score": "/score"}
"""By task of a model that pools, the endpoint for it; /pooling has the others, except `embed`."""
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def make_params(
    model: ServedModel,
    context: RequestContext,
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured_outputs: StructuredOutputsParams | None,
) -> SamplingParams | BeamSearchParams:
    """Return the parameters of a request, with the checkpoint's recommendation for those that it does not set.

    With `max_tokens` None, an output may fill the context. `structured_outputs` is the constraint on the output, which
    may come from the request's tools. Raises RequestError or ApiError for invalid or contradicting parameters.
    """
    tenant = "/".join(filter(None, (context.tenant, request.user)))  # no client can act as another key's tenant
    if request.use_beam_search:
        return _beam_search(model, request, max_tokens, logprobs, structured_outputs, tenant)
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    return replace(
        model.llm.default_sampling_params(),
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(request.logit_bias),
        structured_outputs=structured_outputs,
        prediction=request.prediction.text if isinstance(request.prediction, Prediction) else request.prediction,
        tenant=tenant,
        output_kind="delta" if request.stream else "final_only",
    )


def name_fields(names: dict[str, str], request: SamplingFields) -> None:
    """Add the request's names of fields that the engine's error messages call otherwise."""
    if request.structured_outputs is not None:
        return
    for name in (*_GUIDED, "response_format"):
        if getattr(request, name) is not None:
            names.setdefault("structured_outputs", names.get(name, name))


def content_format(request: SamplingFields) -> ResponseFormat | None:
    """The `response_format`, if it constrains the content."""
    form = request.response_format
    return None if form is None or form.type == "text" else form


def structure(request: SamplingFields) -> StructuredOutputsParams | None:
    """The constraint on the output, from whichever field sets it; objects of a schema are closed. Raises ApiError if
    several fields set different ones."""
    found: dict[str, StructuredOutputsParams] = {}
    if (form := content_format(request)) is not None:
        schema = form.json_schema
        if form.type == "json_object":
            found["response_format"] = StructuredOutputsParams(json_object=True)
        elif form.type == "structural_tag":
            names = ("format", "structures", "triggers")
            given = {name: value for name in names if (value := getattr(form, name)) is not None}
            found["response_format"] = StructuredOutputsParams(structural_tag=given)
        elif schema is None:
            raise invalid(
                "response_format of type json_schema requires the field json_schema", "response_format.json_schema"
            )
        else:
            found["response_format"] = StructuredOutputsParams(json=schema.schema)
    if request.structured_outputs is not None:
        found["structured_outputs"] = request.structured_outputs
    for name, field in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            found[name] = StructuredOutputsParams(**{field: value})
    first = next(iter(found.values()), None)
    if any(other != first for other in found.values()):  # clients of vLLM give the same under its old and new name
        raise invalid(f"{' and '.join(found)} each constrain the output; set only one of them", next(iter(found)))
    return first if first is None or first.json is None else replace(first, disable_additional_properties=True)


def num_choices(request: SamplingFields) -> int:
    """Number of choices returned for each prompt."""
    return 1 if request.n is None else request.n


def check_generates(model: ServedModel, embed: str = "/v1/embeddings") -> None:
    """Raise ApiError (400) with the endpoints that the model has, if it pools. `embed` is that of embeddings."""
    if (pooler := model.llm.pooler) is not None:
        paths = dict.fromkeys({**_POOLING_PATHS, "embed": embed}.get(task, "/pooling") for task in pooler.tasks)
        message = f"this model pools texts, and cannot generate: send the text to {' or '.join(paths)}"
        raise invalid(message, "model", "unsupported_task")


def check_request(model: ServedModel, request: SamplingFields, num_prompts: int = 1) -> None:
    """Check the model and limits before the request is processed. Raises ApiError."""
    check_generates(model)
    args, num_samples = model.args, max(num_choices(request), request.best_of or 1)
    if num_prompts > args.max_prompts_per_request:
        limit = args.max_prompts_per_request
        raise invalid(f"prompt contains {num_prompts:,} prompts; at most {limit:,} are allowed", "prompt")
    if num_prompts * num_samples > args.max_choices_per_request:
        name = "n" if num_samples == num_choices(request) else "best_of"
        raise invalid(
            f"{num_prompts:,} prompts times {name}={num_samples:,} are {num_prompts * num_samples:,} choices; at most "
            f"{args.max_choices_per_request:,} are allowed",
            name,
        )
    vocab_size = model.llm.model_config.vocab_size
    for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):  # checking each of them would take long
        if (num_ids := len(getattr(request, name) or ())) > vocab_size:
            raise invalid(f"{name} contains {num_ids:,} token ids, but this model has only {vocab_size:,}", name)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options requires stream=true", "stream_options")


def _beam_search(
    model: ServedModel,
    request: SamplingFields,
    max_tokens: int | None,
    logprobs: int | None,
    structured_outputs: StructuredOutputsParams | None,
    tenant: str,
) -> BeamSearchParams:
    for name in _NOT_WITH_BEAMS:
        if getattr(request, name) is not None:
            raise invalid(f"{name} cannot be combined with use_beam_search", name)
    if logprobs is not None:
        raise invalid("logprobs cannot be combined with use_beam_search", "logprobs")
    n = num_choices(request)
    others = ("ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "priority")
    names = ("temperature", "length_penalty", "early_stopping", *others)
    given: dict[str, Any] = {name: value for name in names if (value := getattr(request, name)) is not None}
    return BeamSearchParams(
        n if request.best_of is None else request.best_of,
        model.llm.model_config.max_model_len if max_tokens is None else max_tokens,
        n=n,
        structured_outputs=structured_outputs,
        tenant=tenant,
        **given,
    )


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """Convert the keys, which are strings in JSON, to token ids."""
    if given is None:
        return None
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise invalid(f"logit_bias[{key[:40]!r}]: the key must be a token id in decimal digits", "logit_bias")
        bias[int(key)] = value
    return bias
