"""Writes docs/performance.md and its plots from a results file."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import scaling, speculation
from benchmarks.markdown import table, title
from benchmarks.plots import plot_growth, plot_throughput
from benchmarks.targets import targets

Row = dict[str, Any]

_HEAD = """# Performance

`python -m benchmarks report` writes this page from the results of `python -m benchmarks all`; do not edit it. On your
own machine, `python -m benchmarks all` installs the other engines, measures, and writes this page again; `--quick`
measures fewer cases. Each section names the command that measures only this section.

**Shares of the limit.** Two speeds of the machine are measured in the same run, between the measurements: reading
memory, and multiply-adds in registers (of bfloat16, or of 8-bit integers for quantized weights), with all threads
together. The least time of a generation is the sum over its steps of the longer of two times: reading all weights once,
and multiplying by them. Every token is counted in every layer, though Quire's last layer leaves out those that nothing
reads, which is up to 4 % of a prompt with 24 layers. Attention and everything else is not counted, so an engine stays
below 1.00, unless other programs slow the machine down while its speed is measured. int8 and int4 weights have half and
a quarter of the bytes, and are multiplied at the machine's peak for 8-bit integers, about twice that of bfloat16.

**Interleaved measurement.** All engines of a table have the same checkpoint loaded, and engines that are not being
measured are stopped. Each case runs once to warm up, then in the order A B C A B C, two or three times, or up to nine
times in 45 s. Figures are medians of the rounds, and ratios are medians of the ratios within a round.
"""


def write_report(results: Path, out: Path) -> None:
    """Write `out`, and its plots into a folder of the same name. Figures without results have no section."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    plots = out.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    sections = [_HEAD]
    for name, section in _SECTIONS.items():
        found = [row for row in rows if row["figure"] == name]
        if found:
            sections.append("\n".join(section(found, plots)) + "\n")
        if name == "machine":
            sections.append("\n".join(_targets(rows)) + "\n")
    out.write_text("\n".join(sections), encoding="utf-8")


def _machine(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    row = rows[-1]
    yield (
        f"**Machine.** {row['cpu']}, {row['threads']} threads, {row['memory_bytes'] / 2**30:.0f} GiB; "
        f"Python {row['python']}, torch {row['torch']}; {row['date']}{', with --quick' if row['quick'] else ''}."
    )


def _targets(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of all targets, and below it the reasons for those that are missed."""
    found = list(targets(rows))
    yield "## Targets\n\nFor targets that are missed, the measurements below the table show the reason.\n"
    head = ("target", "at least or at most", "measured", "")
    yield from table(head, ((t.what, t.aim, value, "met" if t.is_met(value) else "missed") for t, value in found))
    reasons: dict[str, list[str]] = {}
    for target, value in found:
        if not target.is_met(value):
            reasons.setdefault(target.why(rows), []).append(target.what)
    for why, missed in reasons.items():
        yield f"\n- {'; '.join(missed)}: {why or 'unknown'}."


def _throughput(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Throughput, Qwen2-0.5B's shape", "python -m benchmarks throughput")
    plot_throughput(rows, plots / "throughput.svg")
    yield f"![Output tokens per second by engine and batch]({plots.name}/throughput.svg)\n"
    yield "Output tokens per second; for the prompt of 2,048 tokens, which generates one, prompt tokens per second."
    for precision in dict.fromkeys(row["precision"] for row in rows):
        yield f"\n### {precision}\n"
        yield from _engines([row for row in rows if row["precision"] == precision])


def _sampled(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Sampled tokens", "python -m benchmarks sampled")
    yield "The same checkpoint in bfloat16, tokens drawn at temperature 0.8 with top-p 0.95. Random weights give nearly"
    yield "flat logits, of which top-p keeps most: that takes longer than behind a trained model.\n"
    yield from _engines(rows)


def _embedded(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("The embedded checkpoint", "python -m benchmarks embedded")
    yield "quire-tiny has 7 million weights, which fit into the CPU's caches: this measures everything but the model.\n"
    yield from _engines(rows)


def _mixture(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("A mixture of experts", "python -m benchmarks mixture")
    yield "Four layers of Qwen3-30B-A3B's shape (128 experts, 8 for a token) with random weights and a vocabulary of"
    yield "8,192, all engines from one GGUF file in Q4_0: quire quantizes it to int4, quire-gguf and llama.cpp keep its"
    yield "blocks. The limit is reading the weights that one token needs.\n"
    steps = [row for row in rows if "step_ms" in row]
    head = ("engine", "a token's MB", "step ms", "of the limit")
    yield from table(head, ((r["engine"], r["bytes"] // 10**6, r["step_ms"], r["of_limit"]) for r in steps))
    yield ""
    yield from _engines([row for row in rows if "step_ms" not in row])


def _formats(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Checkpoints of other tools", "python -m benchmarks formats")
    yield "Qwen2-0.5B's shape with random weights; the limit is that of the bytes which each engine of Quire keeps."
    yield "Tables compare with the first engine."
    for name in dict.fromkeys(row["format"] for row in rows):
        yield f"\n### {name}\n"
        yield from _engines([row for row in rows if row["format"] == name])


def _adapters(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("LoRA adapters", "python -m benchmarks adapters")
    yield "Qwen2-0.5B's shape in bfloat16; adapters of rank 16 on all projections. The cost is the median of what"
    yield "adapters add to the time of a batch of 128 tokens in, run with and without them in turn.\n"
    measured = [row for row in rows if "cost" in row]
    head = ("prompts", "different adapters", "engine", "cost")
    costs = ((r["num_prompts"], r["num_adapters"], r["engine"], f"{100 * r['cost']:.1f} %") for r in measured)
    yield from table(head, costs)
    for row in rows:
        if "left_out" in row:
            yield f"\n{row['engine']} is left out: {row['left_out']}"


def _fallback(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Transformers' modules", "python -m benchmarks fallback")
    yield "Qwen3-0.6B's shape with random weights, through Quire's own model and with `--model-impl transformers`."
    for precision in dict.fromkeys(row["precision"] for row in rows):
        yield f"\n### Transformers' modules, {precision}\n"
        yield from _engines([row for row in rows if row["precision"] == precision])


def _embeddings(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Embeddings", "python -m benchmarks embeddings")
    measured = [row for row in rows if "texts_per_s" in row]
    count, num_tokens = measured[0]["num_texts"], measured[0]["num_tokens"]
    yield f"all-MiniLM-L6-v2, {count} texts of 3 to 256 tokens, {num_tokens:,} in all, which each engine tokenizes too."
    yield "quire-http is the server, with two clients that send 64 texts in each request. openvino runs integers for"
    yield "weights and inputs (NNCF), fastembed in int8 ONNX Runtime's dynamic quantization. Engines that pad get texts"
    yield "of similar lengths together, 32 at a time. The limit is that of the matrix products alone.\n"
    ready = {(row["engine"], row["precision"]): row["load_s"] for row in rows if "load_s" in row}
    head = ("engine", "precision", "texts/s", "of the limit", "a short text, ms", "ready after, with imports")
    yield from table(
        head,
        (
            (
                row["engine"],
                row["precision"],
                row["texts_per_s"],
                f"{row['of_limit']:.2f}" if "of_limit" in row else "",
                f"{row['short_ms']:.2f}",
                f"{ready[row['engine'], row['precision']]:.1f} s",
            )
            for row in measured
        ),
    )
    yield "\n" + _speeds([row for row in measured if "of_limit" in row])
    for row in (row for row in rows if row.get("what") == "ready"):
        yield (
            f"\nStarted {len(row['starts_s'])} times, Quire in {row['precision']} is ready, with imports, after "
            f"{row['ready_s']:.2f} s (the median); importing torch alone takes {row['import_torch_s']:.2f} s."
        )


def _beside(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Generation beside embeddings", "python -m benchmarks beside")
    row = rows[-1]
    yield (
        f"One server with Qwen2-0.5B's shape in bfloat16, which generates one stream, and all-MiniLM-L6-v2, to which "
        f"{row['num_clients']} clients send 8 texts in each request; {row['num_gaps']} gaps of the stream, alone and "
        f"beside them in turn. The stream's tokens are {'the same' if row['same_tokens'] else 'others'}; meanwhile "
        f"{row['texts_per_s']} texts/s are embedded.\n"
    )
    found = ((name, *row[f"{name}_ms"], row[f"{name}_ratio"]) for name in ("median", "p95"))
    yield from table(("gap", "alone, ms", "beside, ms", "ratio"), found)


def _engines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a row for each case and engine, and the engines that are left out."""
    ready = {row["engine"]: row["load_s"] for row in rows if "load_s" in row}
    measured = [row for row in rows if "elapsed_s" in row]
    if measured:
        head = (
            "prompts x in / out",
            "engine",
            "tokens/s",
            "steps/s",
            "Quire is faster by",
            "of the limit",
            "ready after",
        )
        yield from table(head, (_engine(row, ready) for row in measured))
        yield "\n" + _speeds(measured)
    for row in rows:
        if "left_out" in row:
            yield f"\n{row['engine']} is left out: {row['left_out']}"


def _engine(row: Row, ready: dict[str, float]) -> tuple[object, ...]:
    prefill = row["output_len"] == 1
    return (
        f"{row['num_prompts']} x {row['input_len']} / {row['output_len']}",
        row["engine"],
        f"{row['input_tokens_per_s' if prefill else 'output_tokens_per_s']:.1f}",
        f"{row['steps_per_s']:.1f}",
        f"{row['quire_speedup']:.2f}" if "quire_speedup" in row else "",
        f"{row['of_limit']:.2f}" if "of_limit" in row else "",
        f"{ready[row['engine']]:.1f} s",
    )


def _speeds(rows: Sequence[Row]) -> str:
    read, peak = ([row[name] for row in rows] for name in ("read_gb_per_s", "peak_gflop_per_s"))
    return f"The machine's speeds in this run: {min(read)} to {max(read)} GB/s, {min(peak)} to {max(peak)} GFLOP/s."


def _ready(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Start-up", "python -m benchmarks ready")
    yield "The weights are in the page cache. Memory does not include that of torch, and the KV cache is small.\n"
    yield from table(("", "seconds", "target"), ((row["what"], row["seconds"], row["target"]) for row in rows))
    load = rows[-1]
    yield (
        f"\nMemory after loading: {load['memory_bytes'] / 1e6:.0f} MB, {load['of_weights']:.2f} of the weights; peak "
        f"while loading: {load['peak_bytes'] / 1e6:.0f} MB, {load['peak_of_weights']:.2f} "
        f"(target: at most {load['of_weights_target']})."
    )


def _parts(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Parts of a step", "python -m benchmarks parts")
    yield "Medians of kernels that are called one at a time. The limit of products is the time to read all weights or"
    yield "to multiply by them, whichever is longer. The rest is the remaining time of the whole step.\n"
    head = ("weights", "sequences x tokens", "step ms", "products ms", "of their limit", "attention ms",
            "other kernels ms", "rest ms")  # fmt: skip
    yield from table(head, map(_part, rows))
    yield "\n" + _speeds(rows)


def _part(row: Row) -> tuple[object, ...]:
    kernels = [row[f"{part}_ms"] for part in ("products", "attention", "others")]
    left = max(0.0, row["step_ms"] - sum(kernels))
    size = f"{row['num_seqs']} x {row['num_tokens']}"
    return row["precision"], size, row["step_ms"], kernels[0], row["products_of_limit"], *kernels[1:], f"{left:.2f}"


def _rest(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("A step outside the model", "python -m benchmarks rest")
    yield "The time of a decode step outside the model: scheduling, inputs, sampling (temperature 0.8, top-k 50, top-p"
    yield "0.9), commit, text, outputs (deltas, as a server sends them). Target: under 5 % for the larger model.\n"
    names = ("model", "num_seqs", "step_ms", "rest_ms", "of_step")
    yield from table(
        ("model", "sequences", "step ms", "outside the model ms", "of the step"), ([r[n] for n in names] for r in rows)
    )


def _latency(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Latency", "python -m benchmarks latency", "quire bench latency")
    yield "Prompts of 128 tokens in and 64 out. The limit is reading all weights once for each token.\n"
    head = ("concurrent", "first token ms, p50", "p90", "p99", "between tokens ms, p50", "p90", "p99", "of the limit")
    yield from table(
        head,
        (
            (row["concurrency"], *row["first_token_ms"].values(), *row["between_tokens_ms"].values(), row["of_limit"])
            for row in rows
        ),
    )


def _growth(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Growth of a decode step", "python -m benchmarks growth")
    for by, x in (("batch", "num_seqs"), ("context", "context")):
        found = [row for row in rows if row["by"] == by]
        curves = {
            name: [row for row in found if row["model"] == name] for name in dict.fromkeys(r["model"] for r in found)
        }
        plot_growth(curves, x, "step_ms", plots / f"growth-{by}.svg")
        yield f"![Milliseconds of a step by {by}]({plots.name}/growth-{by}.svg)\n"
        for name, curve in curves.items():
            yield f"{name}: {_growth_words(curve, x, 'step_ms')}.\n"
    head = ("model", "sequences", "context", "step ms", "of the limit")
    yield from table(head, ((r["model"], r["num_seqs"], r["context"], r["step_ms"], r["of_limit"]) for r in rows))
    yield "\n" + _speeds(rows)


def _growth_words(curve: Sequence[Row], x: str, y: str) -> str:
    first, last = curve[0], curve[-1]
    cost, size = last[y] / first[y], last[x] / max(1, first[x])
    verdict = "linear or better" if cost <= size else "more than linear"
    return f"from {x} {first[x]:,} to {last[x]:,} ({size:,.0f} times), the cost grows {cost:.1f} times: {verdict}"


def _kernels(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Kernels", "python -m benchmarks kernels", "quire bench kernels")
    yield from _limited(rows, "kernel", ("rows", "n", "k", "block_bytes"))


def _isas(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Other instruction sets", "python -m benchmarks isas", "QUIRE_ISA=avx2 quire bench kernels")
    yield "Each variant is compared with the limits of its own instructions on this machine, with all threads.\n"
    yield "A table of all variants, with other engines: [which CPU](how-to/which-cpu.md#what-was-measured).\n"
    head = ("variant", "weights", "rows", "n", "k", "us", "GB/s", "GFLOP/s", "limited by", "of the limit")
    names = ("isa", "dtype", "rows", "n", "k", "us", "gb_per_s", "gflop_per_s", "limit", "of_limit")
    yield from table(head, ([row[name] for name in names] for row in rows))


def _avx2(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Processors with AVX2 alone", "python -m benchmarks avx2")
    yield "Qwen2-0.5B's shape; llama.cpp is compiled for AVX2, FMA and F16C, with Q8_0 and Q4_K_M. The limit is that of"
    yield "the same instructions."
    for precision in dict.fromkeys(row["precision"] for row in rows):
        yield f"\n### AVX2, {precision}\n"
        yield from _engines([row for row in rows if row["precision"] == precision])


def _attention(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Attention", "python -m benchmarks attention", "quire bench attention")
    decodes = [row for row in rows if row["attention"] == "decode" and row["block_size"] == 16]
    shapes = dict.fromkeys((tuple(row["heads"]), row["num_seqs"]) for row in decodes)
    curves = {
        f"{heads} x {num_seqs}": [r for r in decodes if (tuple(r["heads"]), r["num_seqs"]) == (heads, num_seqs)]
        for heads, num_seqs in shapes
    }
    plot_growth(curves, "context", "us", plots / "growth-attention.svg")
    yield f"![Microseconds of decode attention by context]({plots.name}/growth-attention.svg)\n"
    yield "Heads are given as (query heads, key-value heads, head dimension).\n"
    yield from _limited(rows, "attention", ("heads", "cache", "block_size", "context", "num_seqs"))


def _limited(rows: Sequence[Row], name: str, sizes: Sequence[str]) -> Iterator[str]:
    yield f"Instruction set {rows[0]['isa']}, {rows[0]['threads']} threads, {rows[0]['dtype']}.\n"
    head = (name, *sizes, "us", "GB/s", "GFLOP/s", "limited by", "of the limit")
    figures = ("us", "gb_per_s", "gflop_per_s", "limit", "of_limit")
    yield from table(head, ((row[name], *(row.get(key, "") for key in (*sizes, *figures))) for row in rows))


def _scheduler(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("Bookkeeping", "python -m benchmarks scheduler", "quire bench scheduler")
    curves = {
        f"{n} running": [row | {"us": row["schedule_us"] + row["commit_us"]} for row in rows if row["num_seqs"] == n]
        for n in dict.fromkeys(row["num_seqs"] for row in rows)
    }
    plot_growth(curves, "num_waiting", "us", plots / "growth-waiting.svg")
    yield f"![Microseconds of schedule and commit by waiting requests]({plots.name}/growth-waiting.svg)\n"
    for name, curve in curves.items():
        yield f"{name}: {_growth_words(curve, 'num_waiting', 'us')}.\n"
    names = ("num_seqs", "num_waiting", "add_us", "schedule_us", "commit_us")
    yield from table(names, ([row[name] for name in names] for row in rows))


def _kv_cache(rows: Sequence[Row], plots: Path) -> Iterator[str]:
    yield from title("KV cache", "python -m benchmarks kv_cache", "python tools/bench_kv.py")
    for name in dict.fromkeys(row["name"] for row in rows):
        found = [row for row in rows if row["name"] == name]
        columns = [key for key in found[0] if key not in ("figure", "name")]
        yield f"\n### {name}\n"
        yield from table(columns, ([row.get(key, "") for key in columns] for row in found))


_SECTIONS: dict[str, Callable[[Sequence[Row], Path], Iterator[str]]] = {
    "machine": _machine,
    "throughput": _throughput,
    "sampled": _sampled,
    "embedded": _embedded,
    "mixture": _mixture,
    "formats": _formats,
    "adapters": _adapters,
    "fallback": _fallback,
    "embeddings": _embeddings,
    "beside": _beside,
    "ready": _ready,
    "parts": _parts,
    "rest": _rest,
    "speculation": speculation.report,
    "speculation_peers": speculation.report_peers,
    "latency": _latency,
    "growth": _growth,
    "scaling": scaling.report,
    "kernels": _kernels,
    "isas": _isas,
    "avx2": _avx2,
    "attention": _attention,
    "scheduler": _scheduler,
    "kv_cache": _kv_cache,
}
