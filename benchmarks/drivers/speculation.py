"""One row of JSON for each kind of text: `speculation MODEL DRAFT PRECISION ROUNDS [METHOD ...]`.

Runs with and without drafts are interleaved. With methods, only texts that are drafted by these are measured. All
requests are greedy and run one at a time. The outputs must be equal.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

from msgspec.structs import replace

from benchmarks.engines.peers import ROOT
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.requests import grammar_queue
from quire.engine.requests.input_processor import Prompt

QUESTIONS = ROOT / "tests" / "data" / "recall.json"
_NUM_QUESTIONS = 6
_NUM_EDITED = 200
_CHANGED_EVERY = 20
"""Of the tokens of a prediction, one in so many is another one than the model writes: a name that has changed."""
CODE = ("def read_lines(path):\n", "    def __init__(self, name, value):\n")
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "module": {"type": "string", "maxLength": 12},
        "summary": {"type": "string", "maxLength": 40},
        "is_deprecated": {"type": "boolean"},
        "return_type": {"enum": ["str", "bytes", "int", "None"]},
    },
    "required": ["name", "module", "summary", "is_deprecated", "return_type"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _FUNCTION, "minItems": 3, "maxItems": 3}


@dataclass(frozen=True)
class _Case:
    """Requests that engines answer in turn."""

    baselines: dict[str, str]
    """`off`, the engine without drafts, or `drawn`, the same without jumps; and what the text is called in the row that
    compares with it."""
    method: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    are_new: bool = False
    """Whether each round has another prompt."""


class _Round(NamedTuple):
    seconds: float
    num_steps: int
    token_ids: list[list[int]]
    """Of each prompt."""


def rows(model: str, draft: str, precision: str, num_rounds: int, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the speed-up by a draft model for answers and code, by forced tokens for JSON, by a prediction for an edit.

    As an edit counts what the model writes anyway, predicted with one token in 20 changed. JSON is written for another
    prompt in each round, since forced tokens are those that were drawn before. It is compared with an engine that draws
    each token, and with one that appends the tokens that the grammar leaves no choice of.
    """
    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory": "256MiB"}
    arguments |= {"quantization": None if precision == "bfloat16" else precision, "enable_prefix_caching": False}
    configs = {
        "off": {"method": "off"},
        "draft_model": {"method": "draft_model", "model": draft},
        "forced": {"method": "forced"},
        "prediction": {"method": "prediction"},
    }
    wanted = {name: config for name, config in configs.items() if not only or name in ("off", *only)}
    llms = {name: LLM(model, speculative_config=config, **arguments) for name, config in wanted.items()}
    pairs = sorted(json.loads(QUESTIONS.read_text()), key=lambda pair: -len(pair["answer"]))[:_NUM_QUESTIONS]
    chats = [llms["off"].chat_prompt([{"role": "user", "content": pair["question"]}]) for pair in pairs]
    greedy = SamplingParams(temperature=0, max_tokens=64)
    array = SamplingParams(temperature=0, max_tokens=400, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    edited = SamplingParams(temperature=0, max_tokens=_NUM_EDITED, ignore_eos=True)
    written = list(llms["off"].generate(CODE[0], edited, use_tqdm=False)[0].outputs[0].token_ids)
    written[_CHANGED_EVERY // 2 :: _CHANGED_EVERY] = [7] * len(written[_CHANGED_EVERY // 2 :: _CHANGED_EVERY])
    as_json = "JSON by schema"
    cases = (
        _Case({"off": "answers"}, "draft_model", chats, greedy),
        _Case({"off": "code"}, "draft_model", CODE, greedy),
        _Case({"drawn": as_json, "off": f"{as_json}, forced tokens appended"}, "forced", chats, array, are_new=True),
        _Case({"off": "edit of code"}, "prediction", CODE[:1], replace(edited, prediction=written)),
    )
    for case in (case for case in cases if case.method in wanted):
        yield from _compared(case, llms, precision, num_rounds)


def _compared(case: _Case, llms: Mapping[str, LLM], precision: str, num_rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each baseline. Of rounds with a prompt of their own, tokens and steps are added."""
    found: dict[str, list[_Round]] = {name: [] for name in (*case.baselines, case.method)}
    for turn in range(len(case.prompts) if case.are_new else 1 + num_rounds):
        asked = [case.prompts[turn]] if case.are_new else case.prompts
        for name, of_rounds in found.items():
            llm = llms["off" if name == "drawn" else name]
            of_rounds.append(_run(llm, asked, case.params, jumps=name != "drawn"))
    counted = {name: of_rounds[1:] if case.are_new else of_rounds[-1:] for name, of_rounds in found.items()}
    drafted = counted[case.method]
    for name, text in case.baselines.items():
        seconds = [[r.seconds for r in found[each][1:]] for each in (name, case.method)]
        yield {
            "text": text, "method": case.method, "precision": precision,
            "num_tokens": sum(len(ids) for r in drafted for ids in r.token_ids),
            "num_steps": [sum(r.num_steps for r in each) for each in (counted[name], drafted)], "elapsed_s": seconds,
            "speedup": round(statistics.median(plain / fast for plain, fast in zip(*seconds, strict=True)), 3),
            "is_equal": [r.token_ids for r in counted[name]] == [r.token_ids for r in drafted],
        }  # fmt: skip


def _run(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, *, jumps: bool) -> _Round:
    """Answer one prompt after another. Without `jumps`, tokens are drawn that the grammar leaves no choice of."""
    scheduler = llm.engine.scheduler
    first = scheduler.num_steps
    with nullcontext() if jumps else patch.object(grammar_queue, "_jumps", lambda _: False):
        start = time.perf_counter()
        token_ids = [list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids) for prompt in prompts]
        return _Round(time.perf_counter() - start, scheduler.num_steps - first, token_ids)


if __name__ == "__main__":
    given_model, given_draft, given_precision, given_rounds, *given_only = sys.argv[1:]
    for row in rows(given_model, given_draft, given_precision, int(given_rounds), given_only):
        print(json.dumps(row), flush=True)
