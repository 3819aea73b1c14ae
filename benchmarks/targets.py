"""Performance targets and the results."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.reasons import (
    Rows,
    at_the_limit,
    attention_share,
    avx2,
    avx2_bytes,
    avx2_groups,
    beside_products,
    case,
    embedding_products,
    formats,
    import_of_torch,
    int4_head,
    int8_cache_speedup,
    multiplying,
    nothing,
    of,
    parts,
    prompt_loops,
    prompts_and_steps,
    short_text,
    small_steps,
)


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


_SHAPES = ([14, 2, 64], [32, 8, 128])

TARGETS = (
    *(
        Target(
            f"bfloat16, {n} concurrent: share of the limit",
            aim,
            case("of_limit", "quire", "bfloat16", n),
            parts("bfloat16", n),
        )
        for n, aim in ((1, 0.88), (8, 0.90), (32, 0.90))
    ),
    *(
        Target(
            f"bfloat16, {n} concurrent: times vLLM",
            aim,
            case("quire_speedup", "vllm-cpu", "bfloat16", n),
            at_the_limit("vllm-cpu", "bfloat16", n),
        )
        for n, aim in ((1, 1.5), (8, 1.25), (32, 1.2))
    ),
    Target(
        "bfloat16, 24 prompts of 200 tokens, 48 out: share of the limit",
        0.90,
        case("of_limit", "quire", "bfloat16", 24, 48),
        prompts_and_steps,
    ),
    Target(
        "bfloat16, 24 prompts of 200 tokens, 48 out: times vLLM",
        1.2,
        case("quire_speedup", "vllm-cpu", "bfloat16", 24, 48),
        at_the_limit("vllm-cpu", "bfloat16", 24, 48),
    ),
    Target(
        "bfloat16, a prompt of 2,048 tokens: share of the limit (on Zen 5 0.80)",
        0.88,
        case("of_limit", "quire", "bfloat16", 1, 1),
        parts("bfloat16", 1, 2048),
    ),
    Target(
        "bfloat16, a prompt of 2,048 tokens: kernels beside products and attention, milliseconds",
        49.0,
        of("others_ms", figure="parts", precision="bfloat16", num_seqs=1, num_tokens=2048),
        beside_products,
        at_most=True,
    ),
    Target(
        "int8, a prompt of 2,048 tokens: share of the limit",
        0.65,
        case("of_limit", "quire", "int8", 1, 1),
        parts("int8", 1, 2048),
    ),
    *(
        Target(
            f"int8, {n} concurrent: share of the limit",
            0.80,
            case("of_limit", "quire", "int8", n),
            parts("int8", n),
        )
        for n in (1, 8, 32)
    ),
    *(
        Target(
            f"int8, {n} concurrent: times OpenVINO int8",
            1.6,
            case("quire_speedup", "openvino-genai", "int8", n),
            at_the_limit("openvino-genai", "int8", n),
        )
        for n in (1, 8, 32)
    ),
    Target(
        "int4, one stream: times llama.cpp Q4_K_M",
        1.7,
        case("quire_speedup", "llama.cpp", "int4", 1),
        int4_head,
    ),
    *(
        Target(
            f"{name}, {n} concurrent: times llama.cpp",
            aim,
            *formats(name, n),
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
            *avx2(precision, n),
        )
        for precision, n, aim in (("int8", 1, 1.3), ("int8", 8, 3.0), ("int4", 1, 1.3), ("int4", 8, 2.0))
    ),
    *(
        Target(
            f"transformers' modules, {precision}, {n} concurrent: time, times that of Quire's own model",
            1.67,
            of("quire_speedup", figure="fallback", precision=precision, num_prompts=n, engine="quire-transformers"),
            at_most=True,
        )
        for precision in ("bfloat16", "int8")
        for n in (1, 8)
    ),
    *(
        Target(
            f"int8 cache, 8,000 tokens x {n}, heads {heads}: times bfloat16",
            1.0,
            int8_cache_speedup(heads, n),
            multiplying(n),
        )
        for heads in _SHAPES
        for n in (1, 8)
    ),
    *(
        Target(
            f"attention, 16,000 tokens x {n}, heads {heads}: share of the limit",
            0.90,
            attention_share(heads, n),
            multiplying(n),
        )
        for heads in _SHAPES
        for n in (1, 8)
    ),
    *(
        Target(
            f"attention, 16,000 tokens x {n}, heads {heads}, blocks of {size}: share of the limit",
            0.80,
            attention_share(heads, n, block_size=size),
            multiplying(n, size),
        )
        for heads in _SHAPES
        for n in (1, 8)
        for size in (64, 128)
    ),
    *(
        Target(
            f"attention, a prompt of 2,048 tokens, heads {heads}: share of the limit",
            aim,
            attention_share(heads, 1, "prefill", 2048),
            prompt_loops,
        )
        for heads, aim in zip(_SHAPES, (0.80, 0.85), strict=True)
    ),
    *(
        Target(
            f"AVX2, products of 4096 x 4096 in {dtype}, {rows} rows: share of the limit",
            0.80,
            of("of_limit", figure="isas", isa="avx2", dtype=dtype, n=4096, k=4096, rows=rows),
            {"int8": avx2_bytes, "int4": avx2_groups}.get(dtype, nothing),
        )
        for dtype in ("bfloat16", "int8", "int4")
        for rows in (1, 8, 32)
    ),
    *(
        Target(
            f"step outside the model, {n} concurrent: share of the step",
            0.05,
            of("of_step", figure="rest", model="qwen2-0.5b", num_seqs=n),
            at_most=True,
        )
        for n in (1, 8, 32)
    ),
    *(
        Target(
            f"embedded checkpoint, {n} concurrent: times vLLM's steps per second",
            3.0,
            of("quire_speedup", figure="embedded", engine="vllm-cpu", num_prompts=n),
            small_steps(n),
        )
        for n in (1, 32)
    ),
    *(
        Target(f"embeddings, {what}", aim, of(name, figure="embeddings", what="ratios"), why)
        for what, name, aim, why in (
            ("bfloat16: times sentence-transformers in float32", "bfloat16_over_torch", 2.5, nothing),
            ("int8: times the fastest engine in int8", "int8_over_int8", 1.3, embedding_products),
            ("a short text: the fastest engine's time, times Quire's in int8", "short_over_peers", 2.0, short_text),
            ("bfloat16, HTTP: share of the rate without it", "http_bfloat16", 0.85, nothing),
            ("int8, HTTP: share of the rate without it", "http_int8", 0.85, nothing),
        )
    ),
    *(
        Target(
            f"embeddings, {precision}: ready, with imports: seconds",
            1.0,
            of("ready_s", figure="embeddings", precision=precision),
            import_of_torch,
            at_most=True,
        )
        for precision in ("bfloat16", "int8")
    ),
    *(
        Target(
            f"a stream's gaps beside 64 clients that embed, {name}: times alone",
            1.5,
            of(f"{name}_ratio", figure="beside"),
            at_most=True,
        )
        for name in ("median", "p95")
    ),
    Target("import quire: seconds", 0.3, of("seconds", figure="ready", what="import quire"), at_most=True),
    Target("LLM(...) ready: seconds", 3.0, of("seconds", figure="ready", what="LLM(...)"), at_most=True),
    Target(
        "memory at the peak of loading: times the weights",
        1.15,
        of("peak_of_weights", figure="ready", what="LLM(...)"),
        at_most=True,
    ),
)


def targets(rows: Rows) -> Iterator[tuple[Target, float]]:
    """Yield the targets whose figures are among the rows, with the figures."""
    for target in TARGETS:
        value = target.figure(rows)
        if value is not None:
            yield target, value
