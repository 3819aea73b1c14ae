"""What is measured: each figure yields rows, which are JSON objects."""

import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import comparisons
from benchmarks.beside import beside
from benchmarks.checkpoints.dense import HIDDEN, INTERMEDIATE, VOCAB, ensure_checkpoint
from benchmarks.embeddings import embeddings
from benchmarks.engines.interleaved import TINY, Row, Run, case, interleaved, speeds
from benchmarks.engines.peers import PRECISIONS, ROOT, Quire, Transformers, Vllm, num_threads
from benchmarks.engines.session import Session
from benchmarks.fleet import fleet
from benchmarks.scaling import scaling
from benchmarks.speculation import beside_others, twin
from quire.cli.bench.limits import Limits, WeightCosts

_BITS = {"bfloat16": 16, "int8": 8, "int4": 4}
"""Bits of a weight, without scales."""


def machine(run: Run) -> Iterator[Row]:
    """Describe the machine."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    cpu = {name.strip(): value.strip() for name, value in lines}
    named = "{model name}, family {cpu family}, model {model}".format_map(cpu) if "cpu family" in cpu else ""
    yield {
        "cpu": named or platform.processor(),
        "threads": num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": time.strftime("%Y-%m-%d"),
        "quick": run.quick,
    }


# Engines, interleaved


def throughput(run: Run) -> Iterator[Row]:
    """Measure batches of 128 tokens in and 64 out, and one long prompt, with all engines of a precision interleaved.

    In bfloat16 also a batch whose prompts take about as long as what they generate.
    """
    cases = [case(num_prompts, 128, 64) for num_prompts in ((1, 8) if run.quick else (1, 8, 32))]
    cases.append(case(1, 2048, 1))
    checkpoint = ensure_checkpoint(run.checkpoint)
    num_params = _num_params(checkpoint)

    def costs(session: Session) -> WeightCosts:
        num_bytes = num_params * _BITS[session.engine.precision] // 8
        return WeightCosts(num_bytes, num_params - VOCAB * HIDDEN, VOCAB * HIDDEN)

    for precision, engines in PRECISIONS.items():
        made = [engine(run.folder, precision) for engine in engines]
        mixed = [] if run.quick or precision != "bfloat16" else [case(24, 200, 48)]
        yield from interleaved(run, made, checkpoint, cases + mixed, 4096, costs)


def sampled(run: Run) -> Iterator[Row]:
    """Measure batches whose tokens are drawn at temperature 0.8 with top-p 0.95, with all engines in bfloat16."""
    made = [engine(run.folder, "bfloat16") for engine in PRECISIONS["bfloat16"]]
    cases = [case(num_prompts, 128, 64) | {"sampled": True} for num_prompts in ((1, 8) if run.quick else (1, 8, 32))]
    yield from interleaved(run, made, ensure_checkpoint(run.checkpoint), cases, 4096)


def embedded(run: Run) -> Iterator[Row]:
    """Measure steps per second of the embedded checkpoint, whose time is mostly spent outside the model."""
    engines = [engine(run.folder) for engine in (Quire, Vllm, Transformers)]
    yield from interleaved(run, engines, TINY, [case(1, 32, 64), case(32, 32, 64)], 2048)


def _num_params(checkpoint: Path) -> int:
    """Return the number of weights of a bfloat16 checkpoint."""
    with (checkpoint / "model.safetensors").open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    offsets = [info["data_offsets"] for name, info in header.items() if name != "__metadata__"]
    return int(max(end for _, end in offsets)) // 2


# Quire only


def ready(run: Run) -> Iterator[Row]:
    """Measure the time of `import quire`, and time and memory of `LLM(...)` with the weights in the page cache."""
    times = []
    for _ in range(5):
        code = "import time; start = time.perf_counter(); import quire; print(time.perf_counter() - start)"
        times.append(float(_python("-c", code)))
    yield {"what": "import quire", "seconds": round(statistics.median(times), 4), "target": 0.3}
    checkpoint = ensure_checkpoint(run.checkpoint)
    (checkpoint / "model.safetensors").read_bytes()
    rows = [json.loads(_python("-m", "benchmarks.drivers.ready", str(checkpoint))) for _ in range(run.rounds + 1)]
    yield {
        "what": "LLM(...)",
        "seconds": round(statistics.median(row["seconds"] for row in rows), 3),
        "target": 3.0,
        "memory_bytes": statistics.median(row["memory_bytes"] for row in rows),
        "peak_bytes": statistics.median(row["peak_bytes"] for row in rows),
        "weight_bytes": rows[0]["weight_bytes"],
        "of_weights": round(statistics.median(row["memory_bytes"] / row["weight_bytes"] for row in rows), 3),
        "peak_of_weights": round(statistics.median(row["peak_bytes"] / row["weight_bytes"] for row in rows), 3),
        "of_weights_target": 1.15,
    }


def growth(run: Run) -> Iterator[Row]:
    """Measure decode steps by batch size and by context length."""
    batches = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    contexts = [128, 512, 2048, 8192, 32000]
    arguments = (
        ("quire-tiny", TINY, 2048, batches),
        ("qwen2-0.5b", ensure_checkpoint(run.checkpoint), 32768, batches[:7]),
    )
    for model, checkpoint, max_model_len, sizes in arguments:
        session = Session(Quire(run.folder), checkpoint, max_model_len)
        try:
            session.call("fill_cache")
            weight_bytes = session.call("weights")["weight_bytes"]
            cases = [("batch", num_seqs, 128) for num_seqs in sizes]
            cases += [("context", 1, context) for context in contexts if context <= max_model_len]
            for by, num_seqs, context in cases:
                found = session.call("decode", num_seqs=num_seqs, context=context, num_steps=4 if run.quick else 16)
                limit = Limits(**session.call("limits"))
                limit_s = limit.least_s(weight_bytes + found["kv_bytes"], num_seqs * weight_bytes)
                row = {"model": model, "by": by, "num_seqs": num_seqs, "context": context}
                row |= {"step_ms": round(found["step_s"] * 1e3, 3), "of_limit": round(limit_s / found["step_s"], 3)}
                yield row | speeds(limit)
        finally:
            session.close()


def parts(run: Run) -> Iterator[Row]:
    """Measure the parts of a step: matrix products (with their share of the limit), attention, other kernels, rest."""
    checkpoint = ensure_checkpoint(run.checkpoint)
    num_params = _num_params(checkpoint)
    body, head = num_params - VOCAB * HIDDEN, VOCAB * HIDDEN
    last = HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE  # what the last layer multiplies the token by that is read
    for precision, bits in _BITS.items():
        num_bytes = (body * bits + head * max(bits, 8)) // 8  # the head is never in int4
        session = Session(Quire(run.folder, precision), checkpoint, 4096)
        try:
            session.call("fill_cache")
            for num_seqs, num_tokens, context in ((1, 1, 160), (8, 1, 160), (32, 1, 160), (1, 2048, 2048)):
                limits = [Limits(**session.call("limits", precision=precision))]
                num_steps = 5 if num_tokens > 1 else 8 if run.quick else 24
                which = {"num_seqs": num_seqs, "num_tokens": num_tokens, "context": context}
                found = session.call("parts", **which, num_steps=num_steps)
                limits.append(Limits(**session.call("limits", precision=precision)))
                limit = Limits(
                    statistics.mean(speed.read_bytes_per_s for speed in limits),
                    statistics.mean(speed.flops_per_s for speed in limits),
                )
                products = num_seqs * (num_tokens * (body - last) + last + head)
                products_s = limit.least_s(num_bytes, 2.0 * products)
                row = {"precision": precision, **which}
                row |= {f"{name[:-2]}_ms": round(seconds * 1e3, 2) for name, seconds in found.items()}
                row |= {"products_of_limit": round(products_s / found["products_s"], 3)}
                yield row | speeds(limit)
        finally:
            session.close()


def rest(run: Run) -> Iterator[Row]:
    """Measure the part of a decode step outside the model: scheduling, inputs, sampling, commit, text, outputs."""
    for model, checkpoint in (("quire-tiny", TINY), ("qwen2-0.5b", ensure_checkpoint(run.checkpoint))):
        session = Session(Quire(run.folder), checkpoint, 2048)
        try:
            for num_seqs in (1, 8, 32):
                found = session.call("rest", num_seqs=num_seqs, num_steps=20 if run.quick else 100)
                row = {"model": model, "num_seqs": num_seqs, "step_ms": round(found["step_s"] * 1e3, 3)}
                row |= {"rest_ms": round(found["rest_s"] * 1e3, 3)}
                yield row | {"of_step": round(found["rest_s"] / found["step_s"], 4)}
        finally:
            session.close()


_LENGTHS_ROUNDS = 9
"""Many, as runs take half a second and differ by a tenth; of three, the best of four fixed numbers is one by chance."""


def speculation(run: Run) -> Iterator[Row]:
    """Measure what drafts gain, with a twin of quire-tiny as expensive as 0.5 B weights, and how well their number is
    chosen."""
    folder = str(twin(run))
    for precision in ("int8",) if run.quick else _BITS:
        for line in _python(
            "-m",
            "benchmarks.drivers.speculation",
            folder,
            "quire-draft",
            precision,
            "1" if run.quick else str(run.rounds),
        ).splitlines():
            yield json.loads(line)
    some = ("draft_model", "1,8") if run.quick else ()
    rounds = run.rounds if run.quick else _LENGTHS_ROUNDS
    for line in _python(
        "-m", "benchmarks.drivers.draft_lengths", folder, "quire-draft", "int8", str(rounds), *some
    ).splitlines():
        yield json.loads(line)


def latency(run: Run) -> Iterator[Row]:
    """Measure the time to the first token and between tokens, under several loads."""
    options = ["--model", str(ensure_checkpoint(run.checkpoint)), "--dtype", "bfloat16", "--max-model-len", "4096"]
    for concurrency in (1, 4) if run.quick else (1, 4, 16):
        yield from _bench("latency", *options, "--concurrency", concurrency, "--num-prompts", 2 * concurrency)


def kernels(run: Run) -> Iterator[Row]:
    """Run `quire bench kernels`."""
    yield from _bench("kernels", "--seconds", 0.1 if run.quick else 1)


def isas(run: Run) -> Iterator[Row]:
    """Measure matrix products of all variants but this CPU's own, each against the limit of its own instructions."""
    for isa in importlib.import_module("quire._native").available_isas()[1:]:
        arguments = ("kernels", "--seconds", 0.1 if run.quick else 0.5, "--rows", 1, 8, 32, 128)
        yield from (row for row in _bench(*arguments, QUIRE_ISA=isa) if row["kernel"] == "matmul")


def attention(run: Run) -> Iterator[Row]:
    """Run `quire bench attention`, and long contexts in larger blocks."""
    seconds = "--seconds", 0.1 if run.quick else 0.5
    yield from _bench("attention", *seconds)
    yield from _bench("attention", *seconds, "--block-size", 64, 128, "--context", 16000, "--num-seqs", 1, 8)


def scheduler(run: Run) -> Iterator[Row]:
    """Run `quire bench scheduler`."""
    waiting = (0, 1000, 100_000) if run.quick else (0, 10, 100, 1000, 10_000, 100_000)
    yield from _bench("scheduler", "--num-seqs", 1, 256, "--waiting", *waiting)


def kv_cache(run: Run) -> Iterator[Row]:
    """Run `tools/bench_kv.py`."""
    tool = ROOT / "tools" / "bench_kv.py"
    fast = ("--only", "accounting", "prefix_lookup") if run.quick else ()
    for line in _python(str(tool), *fast).splitlines() if tool.exists() else ():
        yield json.loads(line)


PEERS = "speculation_peers"
"""The figure that `speculation --peers` measures too."""
FIGURES: dict[str, Callable[[Run], Iterator[Row]]] = {
    "machine": machine,
    "throughput": throughput,
    "sampled": sampled,
    "embedded": embedded,
    "mixture": comparisons.mixture,
    "formats": comparisons.formats,
    "adapters": comparisons.adapters,
    "fallback": comparisons.fallback,
    "embeddings": embeddings,
    "beside": beside,
    "fleet": fleet,
    "ready": ready,
    "parts": parts,
    "rest": rest,
    "speculation": speculation,
    PEERS: beside_others,
    "latency": latency,
    "growth": growth,
    "scaling": scaling,
    "kernels": kernels,
    "isas": isas,
    "avx2": comparisons.avx2,
    "attention": attention,
    "scheduler": scheduler,
    "kv_cache": kv_cache,
}


def _bench(*arguments: object, **variables: str) -> Iterator[Row]:
    for line in _python("-m", "quire", "bench", *map(str, arguments), **variables).splitlines():
        yield json.loads(line)


def _python(*arguments: str, **variables: str) -> str:
    """Run this Python interpreter and return its output."""
    environment = os.environ | Quire(Path()).variables() | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment).stdout
