"""Measure structured output: the time to compile a grammar, and for each token to mask, advance and look ahead.

    python tools/bench_grammar.py                            # the embedded checkpoint's vocabulary
    python tools/bench_grammar.py --tokenizer FOLDER --vocab-size 151936

Prints a table and one line of JSON per structure. Tokens are drawn uniformly from those that the masks allow. The
shares are of a decode step of --step-ms with one sequence and --batch-step-ms with 64, with all masks in one thread.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from quire.common.params import StructuredOutputsParams
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizer.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parents[1] / "src" / "quire" / "models" / "embedded" / "quire-tiny"
NUM_WALKS = 20
MAX_TOKENS = 200
NUM_ROWS = 64


def schema(num_fields: int) -> dict[str, object]:
    """Return the schema of an object whose fields cycle through five kinds."""
    kinds: list[object] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer"},
        {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 5},
        {"enum": ["red", "green", "blue"]},
        {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}, "required": ["at"]},
    ]
    names = [f"field_{i}" for i in range(num_fields)]
    fields = {name: kinds[i % len(kinds)] for i, name in enumerate(names)}
    return {"type": "object", "properties": fields, "required": names, "additionalProperties": False}


STRUCTURES: dict[str, StructuredOutputsParams] = {
    "schema, 2 fields": StructuredOutputsParams(json=schema(2)),
    "schema, 20 fields": StructuredOutputsParams(json=schema(20)),
    "schema, 200 fields": StructuredOutputsParams(json=schema(200)),
    "schema, no spaces": StructuredOutputsParams(json=schema(20), disable_any_whitespace=True),
    "any JSON object": StructuredOutputsParams(json_object=True),
    "regex, date": StructuredOutputsParams(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}"),
    "regex, address": StructuredOutputsParams(regex=r"[a-z0-9.]{1,20}@[a-z0-9]{1,20}\.(com|org)"),
    "regex, anything": StructuredOutputsParams(regex=r"(.|\n)*"),
    "choice of 3": StructuredOutputsParams(choice=["yes", "no", "maybe"]),
    "choice of 1,000": StructuredOutputsParams(choice=[f"city number {i * 7919}" for i in range(1000)]),
    "enum of 1,000": StructuredOutputsParams(json={"enum": [f"value {i}" for i in range(1000)]}),
    "GBNF, sums": StructuredOutputsParams(
        grammar='root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"\n'
    ),
}


def measure(compiler: GrammarCompiler, params: StructuredOutputsParams, vocab_size: int) -> dict[str, float]:
    """Return times in microseconds, or in milliseconds if the name says ms."""
    start_s = time.perf_counter()
    compiler.submit(params).result()
    figures = {"compile_ms": (time.perf_counter() - start_s) * 1e3}
    start_s = time.perf_counter()
    compiler.submit(params).result()
    figures["again_ms"] = (time.perf_counter() - start_s) * 1e3
    mask_s: list[float] = []
    commit_s: list[float] = []
    num_forced = 0
    for seed in range(NUM_WALKS):
        rng, state = np.random.default_rng(seed), compiler.submit(params).result()
        num_tokens = 0
        while num_tokens < MAX_TOKENS and not state.is_finished:
            start_s = time.perf_counter()
            words = state.mask()
            mask_s.append(time.perf_counter() - start_s)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            token_id = int(rng.choice(allowed))
            start_s = time.perf_counter()
            state.advance(token_id)
            forced = [] if state.is_finished else state.forced_tokens()
            for forced_id in forced:
                state.advance(forced_id)
            commit_s.append(time.perf_counter() - start_s)
            num_forced += len(forced)
            num_tokens += 1 + len(forced)
    masks = np.array(mask_s) * 1e6
    return figures | {
        "mask_us": float(masks.mean()),
        "mask_p99_us": float(np.quantile(masks, 0.99)),
        "mask_max_us": float(masks.max()),
        "commit_us": float(np.mean(commit_s) * 1e6),
        "forced_share": num_forced / (len(masks) + num_forced),
    }


def main() -> None:
    """Measure every structure with one tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=str(CHECKPOINT), help="folder with a tokenizer.json")
    parser.add_argument("--vocab-size", type=int, help="vocabulary size of the model, if it is padded")
    parser.add_argument("--step-ms", type=float, default=30.0, help="time of a decode step with one sequence")
    parser.add_argument("--batch-step-ms", type=float, default=140.0, help="time of a decode step with 64 sequences")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_path(args.tokenizer)
    vocab_size = args.vocab_size or tokenizer.vocab_size
    compiler = GrammarCompiler(tokenizer, vocab_size, [tokenizer.eos_token_id or 0])
    start_s = time.perf_counter()
    compiler.submit(StructuredOutputsParams(regex="a")).result()
    print(f"{vocab_size} tokens; loading the library and the vocabulary once: {time.perf_counter() - start_s:.2f} s\n")
    print("| structure | compile ms | again ms | mask us: mean, p99, max | commit us | forced | 1 row | 64 rows |")
    print("|---|---|---|---|---|---|---|---|")
    lines = []
    for name, params in STRUCTURES.items():
        row = measure(compiler, params, vocab_size)
        token_ms = (row["mask_us"] + row["commit_us"]) / 1e3
        row |= {"share_1": token_ms / args.step_ms, "share_64": NUM_ROWS * token_ms / args.batch_step_ms}
        print(
            f"| {name} | {row['compile_ms']:.1f} | {row['again_ms']:.1f} | {row['mask_us']:.0f}, "
            f"{row['mask_p99_us']:.0f}, {row['mask_max_us']:.0f} | {row['commit_us']:.0f} | {row['forced_share']:.0%} "
            f"| {row['share_1']:.2%} | {row['share_64']:.1%} |"
        )
        lines.append(json.dumps({"structure": name, "vocab_size": vocab_size} | row))
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
