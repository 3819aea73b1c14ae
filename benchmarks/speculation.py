"""Speculation: what drafts gain, how well their number is chosen, and both beside other engines."""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drivers.speculation import CODE, QUESTIONS
from benchmarks.engines.interleaved import TINY, Row, Run, start
from benchmarks.engines.peers import Engine, LlamaCpp, Quire, Vllm, num_threads
from benchmarks.markdown import table, title
from quire.text.tokenizer.tokenizer import Tokenizer
from tools.wide_twin import write_wide_twin

DRAFT = TINY.with_name("quire-draft")
METHODS = ("off", "ngram", "draft_model")
_NUM_DRAFTS = 4
_NUM_TOKENS = 64
_NUM_QUESTIONS = 4
_NUM_LEARNING = 2
"""Rounds that are not counted: engines warm up, and Quire learns how long steps take."""


def twin(run: Run) -> Path:
    """A model that says what quire-tiny says and costs what half a billion parameters cost."""
    folder = run.folder / "wide-twin"
    if not (folder / "config.json").exists():
        write_wide_twin("quire-tiny", folder)
    return folder


@dataclass(frozen=True)
class _Drafted(Engine):
    """An engine whose drafts come from `method`."""

    method: str = "off"

    @property
    def label(self) -> str:
        """Name, precision and method."""
        return f"{super().label} {self.method}"

    def _command(self, driver: str, model: Path, draft: Path) -> list[str]:
        return self._driver("drafted", driver, self.method, model, draft, _NUM_DRAFTS, num_threads())


class _Quire(_Drafted, Quire):
    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command."""
        return self._command("quire", checkpoint, DRAFT)


class _Vllm(_Drafted, Vllm):
    _cache_gib = 1

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command."""
        return self._command("vllm", checkpoint, DRAFT)


class _LlamaCpp(_Drafted, LlamaCpp):
    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command, after the conversion of both models."""
        return self._command("llama", self.convert(checkpoint), self.convert(DRAFT))


def beside_others(run: Run) -> Iterator[Row]:
    """Measure each engine against itself without drafts, in bfloat16, one request at a time, interleaved.

    An engine ends before the next one starts, since each is loaded once for every method.
    """
    tokenizer = Tokenizer.from_path(TINY)
    questions = [pair["question"] for pair in json.loads(QUESTIONS.read_text())[: 1 if run.quick else _NUM_QUESTIONS]]
    prompts = [tokenizer.encode(text) for text in (*CODE[: 1 if run.quick else None], *questions)]
    for kind in (_Quire, _Vllm, _LlamaCpp):
        if kind.name in run.engines:
            yield from _beside_itself(run, [kind(run.folder, method=method) for method in METHODS], prompts)


def _beside_itself(run: Run, engines: Sequence[_Drafted], prompts: Sequence[list[int]]) -> Iterator[Row]:
    """Rows of the loads of one engine with each method, and of each method that can be compared."""
    num_learning = 1 if run.quick else _NUM_LEARNING
    times: dict[str, list[float]] = {}
    outputs: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        sessions, rows = start(stack, run, engines, twin(run), 1024)
        yield from ({"load": True} | row | {"method": e.method} for row, e in zip(rows, engines, strict=True))
        for turn in range(num_learning + run.rounds):
            for session in sessions:
                assert isinstance(session.engine, _Drafted)
                method = session.engine.method
                answer = session.call(
                    "generate", prompts=prompts, output_len=_NUM_TOKENS // 2 if run.quick else _NUM_TOKENS
                )
                outputs[method] = answer["outputs"]
                if turn >= num_learning:
                    times.setdefault(method, []).append(answer["elapsed_s"])
    for method, its_times in times.items():
        if method == "off" or "off" not in times:
            continue
        speedup = statistics.median(a / b for a, b in zip(times["off"], its_times, strict=True))
        row = {"engine": engines[0].name, "method": method, "precision": "bfloat16", "speedup": round(speedup, 3)}
        row |= {"elapsed_s": [[round(s, 3) for s in each] for each in (times["off"], its_times)]}
        yield row | {"is_equal": outputs[method] == outputs["off"]}


def report(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    """Yield the section of the report on speculation."""
    yield from title("Speculation", "python -m benchmarks speculation")
    yield "A twin of quire-tiny as expensive as 0.5 B weights, one request at a time, greedy, with and without drafts"
    yield "interleaved: by quire-draft for questions with long answers and for code, by the grammar for JSON, by a"
    yield "prediction, one in 20 of whose tokens is wrong, for an edit. JSON is compared with an engine that draws each"
    yield "token, and with one that appends those that the grammar leaves no choice of, as Quire does without drafts.\n"
    head = ("text", "weights", "drafts", "tokens", "steps without", "steps with", "faster by", "equal")
    yield from table(
        head,
        (
            (r["text"], r["precision"], r["method"], r["num_tokens"], *r["num_steps"], r["speedup"], r["is_equal"])
            for r in rows
            if "speedup" in r
        ),
    )
    yield "\nNumbers of drafts, in int8, several prompts at once: the speed-up over none of the engine's"
    yield "own choice, and of fixed numbers. Random text is drawn at temperature 4, where hardly a draft is right.\n"
    names = ("text", "method", "num_prompts", "chosen", "fixed", "of_best", "is_equal")
    yield from table(
        ("text", "drafts", "prompts", "chosen", "fixed numbers", "of the best", "equal"),
        ([(r | {"fixed": _fixed(r)}).get(n, "") for n in names] for r in rows if "chosen" in r),
    )


def _fixed(row: Row) -> str:
    return ", ".join(f"{number}: {speedup}" for number, speedup in row.get("fixed", {}).items())


def report_peers(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    """Yield the section of the report on other engines' speculation."""
    yield from title("Speculation of other engines", "python -m benchmarks speculation --peers")
    yield "The twin, drafted by lookup or by quire-draft, bfloat16, greedy, one request at a time, interleaved:"
    yield "speed-ups over each itself without drafts, and whether its outputs stayed the same. vLLM is not compiled.\n"
    names = ("engine", "method", "speedup", "is_equal", "left_out")
    found = [r for r in rows if "speedup" in r or "left_out" in r]
    yield from table(names, ([r.get(n, "") for n in names] for r in found))
