"""One row of JSON for each load: `draft_lengths MODEL DRAFT PRECISION ROUNDS [METHOD TEXT NUM_PROMPTS ...]`.

The number of drafts that an engine chooses for itself is compared with fixed numbers, and with none, in turn and in one
engine: what proposes and chooses drafts is exchanged between the runs, so that weights and recordings are the same.
Each choice keeps what it has learned. The outputs must be equal.
"""

import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.drivers.speculation import QUESTIONS
from quire import LLM, SamplingParams
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafting import make_drafting

_FIXED = (1, 2, 4, 8)
_NUM_TOKENS = 48
_NUM_LEARNING = 2
"""Rounds that are not counted: engines learn in them how long steps take."""
_LOADS = {
    "answers": (("draft_model", (1, 4, 8, 16)), ("ngram", (1, 4, 8, 16))),
    "random": (("draft_model", (1, 8, 32)), ("ngram", (1, 8, 32)), ("auto", (1, 8, 32))),
}
"""By text, the methods and numbers of prompts that are measured."""


class Choices:
    """An engine whose drafts come from one of several configurations at a time."""

    def __init__(self, model: str, draft: str, precision: str) -> None:
        self._draft = draft
        self.llm = LLM(
            model,
            dtype="bfloat16",
            quantization=None if precision == "bfloat16" else precision,
            max_model_len=256,
            kv_cache_memory="256MiB",
            enable_prefix_caching=False,
            speculative_config={"method": "draft_model", "model": draft},
        )
        questions = [pair["question"] for pair in json.loads(QUESTIONS.read_text())]
        chats = [self.llm.chat_prompt([{"role": "user", "content": question}]) for question in questions]
        generator = random.Random(0)
        noise = [{"prompt_token_ids": generator.choices(range(3, 7000), k=24)} for _ in range(32)]
        plain: dict[str, Any] = {"max_tokens": _NUM_TOKENS, "ignore_eos": True}
        self._texts: dict[str, tuple[Sequence[Any], SamplingParams]] = {
            "answers": (chats, SamplingParams(temperature=0, **plain)),
            "random": (noise, SamplingParams(temperature=4, seed=0, **plain)),
        }

    def choose(self, **config: Any) -> Any:
        """What proposes drafts with this configuration."""
        named = config | ({"model": self._draft} if config["method"] == "draft_model" else {})
        speculative = SpeculativeConfig.read(named)
        return make_drafting(dataclasses.replace(self.llm.engine.plan.config, speculative=speculative))

    def run(self, drafting: Any, text: str, num_prompts: int, turn: int) -> tuple[float, list[tuple[int, ...]]]:
        """The time of these prompts together, and their outputs. What another turn wrote is no draft in this one."""
        engine, (prompts, params) = self.llm.engine, self._texts[text]
        salted = [prompt | {"cache_salt": str(turn)} for prompt in prompts[:num_prompts]]
        engine.scheduler.drafting = engine.committer.drafting = drafting
        start = time.perf_counter()
        outputs = self.llm.generate(salted, params, use_tqdm=False)
        return time.perf_counter() - start, [tuple(output.outputs[0].token_ids) for output in outputs]


def row(choices: Choices, text: str, method: str, num_prompts: int, num_rounds: int) -> dict[str, Any]:
    """Measure one load: the speed-ups of fixed numbers where they make sense, and of the engine's own choice."""
    configs: dict[str, dict[str, Any]] = {"off": {"method": "off"}, "chosen": {"method": method}}
    if text == "answers":
        for count in _FIXED:
            configs[str(count)] = {"method": method, "num_speculative_tokens": count, "adaptive": False}
    made = {name: choices.choose(**config) for name, config in configs.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    is_equal, expected = True, None
    for turn in range(_NUM_LEARNING + num_rounds):
        for name, drafting in made.items():
            seconds, outputs = choices.run(drafting, text, num_prompts, turn)
            times[name].append(seconds)
            expected = outputs if expected is None else expected
            is_equal &= outputs == expected
    plain = times["off"][_NUM_LEARNING:]
    speedups = {
        name: round(statistics.median(a / b for a, b in zip(plain, its[_NUM_LEARNING:], strict=True)), 3)
        for name, its in times.items()
        if name != "off"
    }
    fixed = {name: speedup for name, speedup in speedups.items() if name != "chosen"}
    found = {"text": text, "method": method, "num_prompts": num_prompts, "chosen": speedups["chosen"]}
    if fixed:
        best = max(fixed, key=lambda name: fixed[name])
        ratios = [b / a for a, b in zip(times["chosen"][_NUM_LEARNING:], times[best][_NUM_LEARNING:], strict=True)]
        found |= {"fixed": fixed, "of_best": round(statistics.median(ratios), 3)}
    return found | {"off_s": [round(s, 3) for s in plain], "is_equal": is_equal}


def rows(choices: Choices, num_rounds: int, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each load; `only` may name methods, texts and numbers of prompts."""
    for text, loads in _LOADS.items():
        for method, counts in loads:
            for count in counts:
                if all({text, method, str(count)} & set(names.split(",")) for names in only):
                    yield row(choices, text, method, count, num_rounds)


if __name__ == "__main__":
    given_model, given_draft, given_precision, given_rounds, *given_only = sys.argv[1:]
    made_choices = Choices(given_model, given_draft, given_precision)
    for each in rows(made_choices, int(given_rounds), given_only):
        print(json.dumps({"precision": given_precision} | each), flush=True)
