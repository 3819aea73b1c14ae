"""Conversion of a request to the message that is sent to the engine process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.common.errors import InvalidParamsError
from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams
from quire.engine.process.messages import AddAny, AddPooling, AddRequest, AddScoring
from quire.engine.requests.input_processor import CheckedRequest

Params = SamplingParams | BeamSearchParams
AnyParams = Params | PoolingParams


def engine_message(key: int, request: CheckedRequest, params: AnyParams | None, seed: int) -> AddAny:
    """Return the message for a request, which is only scored if `params` is None; `seed` is used if they have none.
    Raises msgspec's errors if encoding fails."""
    outputs, salt = request.outputs, request.content_key.cache_salt
    request_id, arrival_time = outputs.request_id, outputs.metrics.arrival_time
    token_ids = list(outputs.prompt_token_ids)  # the caller's outputs have the other list
    if params is None:
        assert outputs.scores is not None
        return AddScoring(key, request_id, token_ids, salt, outputs.scores.first, request.adapter)
    if isinstance(params, PoolingParams):
        types = None if outputs.pooling is None else outputs.pooling.token_type_ids
        uncut = replace(params, truncate_prompt_tokens=None, cache_salt="")  # done already
        return AddPooling(key, request_id, token_ids, salt, arrival_time, uncut, types, request.adapter)
    plain = _engine_params(params, outputs.params.prediction, seed)
    encoded = msgspec.Raw(msgspec.msgpack.encode(plain, enc_hook=_as_builtin))
    is_search = request.search is not None
    return AddRequest(key, request_id, token_ids, salt, arrival_time, is_search, encoded, adapter=request.adapter)


_BUILTINS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (Integral, int),
    (Real, float),
    (str, str),
    (Mapping, dict),
    (Sequence, list),
)


def _as_builtin(value: Any) -> Any:
    """What a number, text, list or mapping of another type is sent as, such as NumPy's. Raises TypeError for others."""
    for kind, builtin in _BUILTINS:
        if isinstance(value, kind):
            return builtin(value)
    raise TypeError(f"objects of the type {type(value).__name__} cannot be sent")


def _engine_params(params: Params, prediction: str | list[int] | None, seed: int) -> Params:
    """Return the parameters for the engine, which makes no text, cuts no prompt and returns all samples."""
    structure = params.structured_outputs
    if structure is not None and isinstance(structure.json, dict):  # JSON may be nested deeper than msgpack allows
        structure = replace(structure, json=msgspec.json.encode(structure.json).decode())
    if isinstance(params, BeamSearchParams):
        return replace(params, detokenize=False, structured_outputs=structure)
    return replace(
        params,
        n=params.num_samples,
        best_of=None,
        seed=seed if params.seed is None else params.seed,
        logprobs=0 if params.ranks_samples and params.logprobs is None else params.logprobs,
        stop=None,
        detokenize=False,
        truncate_prompt_tokens=None,
        cache_salt="",
        structured_outputs=structure,
        prediction=prediction,
        output_kind="delta",
    )


def check_params(params: Any) -> None:
    """Raise InvalidParamsError for what are no parameters, or cannot be sent."""
    if not isinstance(params, Params):
        raise InvalidParamsError(f"params must be SamplingParams or BeamSearchParams, not {type(params).__name__}")
    for name in ("logits_processors", "extra_args") if isinstance(params, SamplingParams) else ():
        if getattr(params, name):
            raise InvalidParamsError(f"{name} cannot be sent to the engine process: use it with LLM only")
