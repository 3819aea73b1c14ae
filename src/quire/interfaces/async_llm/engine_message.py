"""Conversion of a request to the message that is sent to the engine process."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from quire.common.params import BeamSearchParams, SamplingParams
from quire.engine.process.messages import AddRequest, AddScoring
from quire.engine.requests.sequence import SequenceGroup

Params = SamplingParams | BeamSearchParams


def engine_message(key: int, group: SequenceGroup, params: Params, seed: int) -> AddRequest | AddScoring:
    """Return the message for a request; `seed` is used if it has none. Raises msgspec's errors if encoding fails."""
    token_ids, salt = group.prompt_token_ids, group.content_key.cache_salt
    if group.scores is not None and not group.seqs[0].draws:
        return AddScoring(key, group.request_id, token_ids, group.scores.first, salt)
    encoded = msgspec.Raw(msgspec.msgpack.encode(_engine_params(params, seed)))
    is_beam_search = isinstance(params, BeamSearchParams)
    return AddRequest(key, group.request_id, token_ids, salt, group.metrics.arrival_time, is_beam_search, encoded)


def _engine_params(params: Params, seed: int) -> Params:
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
        output_kind="delta",
    )
