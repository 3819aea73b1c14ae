"""One row of JSON for each kind of text: `speculation MODEL DRAFT PRECISION ROUNDS [METHOD ...]`.

Runs with and without drafts are interleaved. With methods, only texts that are drafted by these are measured. All
requests are greedy and run one at a time. The outputs must be equal.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from benchmarks.engines.peers import ROOT
from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

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


def rows(model: str, draft: str, precision: str, num_rounds: int, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the speed-up by a draft model for answers and code, by forced tokens for JSON, by a prediction for an edit.

    As an edit counts what the model writes anyway, predicted with one token in 20 changed. JSON is written for another
    prompt in each round, since forced tokens are those that were drawn before.
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
    cases = (
        ("answers", "draft_model", chats, greedy),
        ("code", "draft_model", list(CODE), greedy),
        ("JSON by schema", "forced", chats, array),
        ("edit of code", "prediction", [CODE[0]], replace(edited, prediction=written)),
    )
    for text, method, prompts, params in (case for case in cases if case[1] in wanted):
        times: dict[str, list[float]] = {"off": [], method: []}
        outputs, num_steps = dict[str, list[RequestOutput]](), dict[str, int]()
        for turn in range(1 + num_rounds):
            asked = prompts if method != "forced" else [prompts[turn % len(prompts)]]
            for name, of_rounds in times.items():
                engine = llms[name].engine
                first = engine.scheduler.num_steps
                start = time.perf_counter()
                outputs[name] = [llms[name].generate(prompt, params, use_tqdm=False)[0] for prompt in asked]
                of_rounds.append(time.perf_counter() - start)
                num_steps[name] = engine.scheduler.num_steps - first
        expected, found = ([output.outputs[0].token_ids for output in outputs[name]] for name in times)
        ratios = [plain / fast for plain, fast in zip(times["off"][1:], times[method][1:], strict=True)]
        yield {
            "text": text, "method": method, "precision": precision, "num_tokens": sum(map(len, expected)),
            "num_steps": list(num_steps.values()), "elapsed_s": [times["off"][1:], times[method][1:]],
            "speedup": round(statistics.median(ratios), 3), "is_equal": expected == found,
        }  # fmt: skip


if __name__ == "__main__":
    given_model, given_draft, given_precision, given_rounds, *given_only = sys.argv[1:]
    for row in rows(given_model, given_draft, given_precision, int(given_rounds), given_only):
        print(json.dumps(row), flush=True)
