"""Comparisons for one kind of checkpoint: mixtures of experts, other tools' formats, adapters, a library's modules."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from benchmarks.checkpoints.dense import ensure_checkpoint
from benchmarks.checkpoints.derived import NUM_ADAPTERS, ensure_qwen3
from benchmarks.checkpoints.mixture import MixtureShape, ensure_mixture
from benchmarks.engines.interleaved import Row, Run, case, interleaved, own_costs, speeds, start
from benchmarks.engines.peers import (
    Engine,
    LlamaCpp,
    LlamaCppAvx2,
    OpenVino,
    Quire,
    QuireAdapters,
    QuireAvx2,
    QuireFallback,
    QuireGguf,
    QuirePacked,
    VllmAdapters,
)
from benchmarks.engines.session import Session
from quire.cli.bench.limits import Limits, WeightCosts

_FORMATS: dict[str, Sequence[tuple[type[Engine], str]]] = {
    "GGUF Q8_0": ((QuireGguf, "int8"), (LlamaCpp, "int8")),
    "GGUF Q4_K_M": ((QuireGguf, "int4"), (LlamaCpp, "int4")),
    "AWQ, groups of 128": ((QuirePacked, "awq"), (Quire, "int4"), (OpenVino, "int4")),
    "GPTQ, groups of 128": ((QuirePacked, "gptq"), (Quire, "int4"), (OpenVino, "int4")),
}
_LIMIT_STEPS = 24


def mixture(run: Run) -> Iterator[Row]:
    """Measure four layers of Qwen3-30B-A3B's shape, from one GGUF file in Q4_0, beside llama.cpp."""
    shape = MixtureShape()
    path = ensure_mixture(run.folder / "models" / f"qwen3-moe-{shape.num_layers}-layers-Q4_0.gguf", shape)
    engines = [Quire(run.folder, "int4"), QuireGguf(run.folder, "int4"), LlamaCpp(run.folder, "int4")]
    cases = [case(num_prompts, 128, 32 if run.quick else 64) for num_prompts in (1, 8, 32)]
    with ExitStack() as stack:
        sessions, _ = start(stack, run, engines[:2], path, 1024)
        for session in sessions:
            yield {"engine": session.engine.name, "precision": "int4"} | _share_of_reading(session)
    yield from interleaved(run, engines, path, cases, 1024)


def _share_of_reading(session: Session) -> Row:
    """Time decode steps of one sequence, with the machine's speed measured before, between and after."""
    costs, limits, steps = WeightCosts(**session.call("costs")), list[Limits](), list[float]()
    for _ in range(3):
        limits.append(Limits(**session.call("limits", precision="int4")))
        steps.append(session.call("decode", num_seqs=1, context=128, num_steps=_LIMIT_STEPS)["step_s"])
    limits.append(Limits(**session.call("limits", precision="int4")))
    limit = Limits(
        statistics.median(each.read_bytes_per_s for each in limits),
        statistics.median(each.flops_per_s for each in limits),
    )
    step_s = statistics.median(steps)
    share = costs.num_bytes / limit.read_bytes_per_s / step_s
    return {"step_ms": round(step_s * 1e3, 3), "bytes": costs.num_bytes, "of_limit": round(share, 3)} | speeds(limit)


def formats(run: Run) -> Iterator[Row]:
    """Measure checkpoints of other tools in Qwen2-0.5B's shape: in turn with the tool, or with Quire's own int4."""
    checkpoint = ensure_checkpoint(run.checkpoint)
    cases = [case(num_prompts, 128, 32 if run.quick else 64) for num_prompts in (1, 8)]
    for name, engines in _FORMATS.items():
        made = [engine(run.folder, precision) for engine, precision in engines]
        for row in interleaved(run, made, checkpoint, cases, 1024, own_costs):
            yield {"format": name} | row


def avx2(run: Run) -> Iterator[Row]:
    """Measure Qwen2-0.5B's shape with AVX2 alone, beside llama.cpp compiled for it."""
    checkpoint = ensure_checkpoint(run.checkpoint)
    cases = [case(num_prompts, 128, 32 if run.quick else 64) for num_prompts in (1, 8)]
    for precision in ("int8", "int4"):
        engines = [QuireAvx2(run.folder, precision), LlamaCppAvx2(run.folder, precision)]
        yield from interleaved(run, engines, checkpoint, cases, 1024, own_costs)


def adapters(run: Run) -> Iterator[Row]:
    """Measure what LoRA adapters of rank 16 add to a step in bfloat16: one at one prompt, eight at eight prompts."""
    checkpoint = ensure_checkpoint(run.checkpoint)
    with ExitStack() as stack:
        engines = [QuireAdapters(run.folder), VllmAdapters(run.folder)]
        sessions, rows = start(stack, run, engines, checkpoint, 1024)
        yield from rows
        for num_prompts, num_adapters in ((1, 1), (8, 1), (8, NUM_ADAPTERS)):
            each = case(num_prompts, 128, 32 if run.quick else 64)
            for session in sessions:  # adapters are loaded, and every engine is slower on the first run of a case
                session.call("generate", **each | {"output_len": 4}, adapters=num_adapters)
                session.call("generate", **each | {"output_len": 4})
            times: list[list[tuple[float, float]]] = [[] for _ in sessions]
            for _ in range(run.rounds):
                for its_times, session in zip(times, sessions, strict=True):
                    plain, adapted = (
                        session.call("generate", **each, adapters=count)["elapsed_s"] for count in (0, num_adapters)
                    )
                    its_times.append((plain, adapted))
            for its_times, session in zip(times, sessions, strict=True):
                cost = statistics.median(adapted / plain for plain, adapted in its_times) - 1
                row = {"engine": session.engine.name, **each, "num_adapters": num_adapters}
                row |= {"elapsed_s": [[round(s, 4) for s in pair] for pair in its_times], "cost": round(cost, 4)}
                yield row


def fallback(run: Run) -> Iterator[Row]:
    """Measure Qwen3-0.6B's shape through transformers' modules, beside the model of this checkout."""
    path = ensure_qwen3(ensure_checkpoint(run.checkpoint), run.folder / "models" / "qwen3-0.6b")
    cases = [case(num_prompts, 128, 32 if run.quick else 64) for num_prompts in (1, 8)]
    for precision in ("bfloat16", "int8"):
        made = [engine(run.folder, precision) for engine in (Quire, QuireFallback)]
        yield from interleaved(run, made, path, cases, 1024)
