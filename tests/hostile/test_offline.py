"""The same requests offline: alone, and in one batch with another whose tokens must not change."""

import re
import resource
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams
from quire.common.errors import RequestError
from quire.common.params import StructuredOutputsParams
from tests.hostile.cases import BASE, GRAMMARS, PARAMS, Ask, Case
from tests.hostile.target import COMPLETIONS, PEAK_MB, RESULTS

CANARY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
_BEAM_FIELDS = ("n", "max_tokens", "length_penalty", "ignore_eos", "stop_token_ids")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def params_of(fields: dict[str, Any]) -> SamplingParams | BeamSearchParams:
    """As the server makes them. Raises RequestError."""
    fields = {name: value for name, value in fields.items() if name != "prompt"}
    for guided, name in _GUIDED.items():
        if guided in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**{name: fields.pop(guided)})
    if isinstance(fields.get("structured_outputs"), dict):
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    if fields.pop("use_beam_search", False):
        width = fields.pop("best_of", fields["n"])
        return BeamSearchParams(width, **{name: fields[name] for name in _BEAM_FIELDS if name in fields})
    if isinstance(bias := fields.get("logit_bias"), dict):  # JSON's keys are texts
        fields["logit_bias"] = {int(key) if re.fullmatch(r"-?[0-9]{1,40}", key) else key: v for key, v in bias.items()}
    return SamplingParams(**fields)


def attempt(llm: LLM, ask: Ask, song: list[int]) -> str | None:
    """Why it was refused, if it was; the canary sings beside it. What it draws is the same alone."""
    fields = {"seed": 0} | BASE[COMPLETIONS] | ask.fields
    try:
        params = params_of(fields)
    except RequestError as error:
        return str(error)
    if isinstance(params, BeamSearchParams):
        return beam_search(llm, fields["prompt"], params)
    outputs = llm.generate(["Once upon a time", fields["prompt"]], [CANARY, params], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == song, "the canary's tokens changed"
    assert outputs[1].finished
    try:
        (alone,) = llm.generate(fields["prompt"], params, use_tqdm=False)
    except RequestError as error:
        assert outputs[1].error
        return str(error)
    assert told(alone) == told(outputs[1])
    return alone.error


def told(output: RequestOutput) -> tuple[str | None, list[list[int]]]:
    return output.error, [choice.token_ids for choice in output.outputs]


def beam_search(llm: LLM, prompt: str, params: BeamSearchParams) -> str | None:
    try:
        return llm.beam_search(prompt, params)[0].error
    except RequestError as error:
        return str(error)


CASES = [
    pytest.param(case, id=case.name, marks=[] if case.is_quick else [pytest.mark.thorough])
    for case in (*PARAMS, *GRAMMARS)
    if case.name != "many prompts"
]


@pytest.mark.parametrize("case", CASES)
def test_offline_alone_and_in_a_batch(llm: LLM, case: Case):
    song = llm.generate("Once upon a time", CANARY, use_tqdm=False)[0].outputs[0].token_ids
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for ask in case:
        if ask.is_online_only or {"guided_json", "guided_regex"} <= ask.fields.keys():
            continue
        reason = attempt(llm, ask, song)
        assert (400 if reason is not None else 200) in ask.statuses, (str(ask.fields)[:300], reason)
        if reason is not None:
            assert re.search(ask.words, reason), (str(ask.fields)[:300], reason)
            assert len(reason) < 4000
        RESULTS.counts["requests offline"] += 1
    RESULTS.counts["cases offline"] += 1
    assert llm.engine.stats().num_used_blocks == 0
    assert len(llm.generate("Hi", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids) == 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024 < PEAK_MB
