"""Write a digest of the tokens and log-probabilities of a fixed mixed workload, to prove that a change alters none.

    python -m reliability.digest [--output FILE] [--compare FILE] [--only TEXT ...]

Run it before and after a change, on the same machine. A section is one checkpoint, one storage (dtype, quantization,
dtype of the cache) and one schedule (scheduling policy, preemption mode), in a cache so small that requests are
preempted, blocks are evicted and prefixes are reused. Its digest is the BLAKE2b hash of everything that its requests
returned, with every log-probability to the last bit; the report also has a short digest of each request. Counters of
the schedule are in the report but not in the digest: they may change.

The program also checks that each section preempted, swapped, evicted and reused what it should, that all schedules of
one storage return the same, and that some requests return the same when they run alone. It uses only public names of
`quire`, so that it runs unchanged on commits that arrange the modules differently. The exit status is 1 if a check
failed or a section differs from the report to compare with; both are listed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import quire
from quire import LLM, BeamSearchOutput, BeamSearchParams, RequestOutput, SamplingParams
from reliability.digest_checkpoints import VARIANTS, save_checkpoint
from reliability.digest_requests import SCHEMA, Request, workload

SMALL: dict[str, Any] = {
    "block_size": 8,
    "num_gpu_blocks_override": 40,
    "max_model_len": 96,
    "max_num_seqs": 20,
    "max_num_batched_tokens": 40,
    "num_threads": 2,
}
ROOMY = SMALL | {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
MODES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space": 0.01},
}
SCHEDULES = [
    *(("fcfs", "recompute"), ("priority", "swap"), ("fair", "recompute"), ("prefix", "swap")),
    *(("fcfs", "swap"), ("priority", "recompute"), ("fair", "swap"), ("prefix", "recompute")),
]
"""(scheduling policy, preemption mode); the first four and the last four each have all policies and both modes"""
EXPECTED = {
    "recompute": ("num_aborted", "num_preemptions", "evicted", "hit_device", "hit_tail"),
    "swap": (
        "num_aborted",
        "num_preemptions",
        "num_swapped_blocks",
        "most_swapped",
        "spilled",
        "hit_device",
        "hit_tail",
    ),
}
"""preemption mode -> counters that must not be 0"""
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32 int8": {"dtype": "float32", "quantization": "int8"},
    "bfloat16 int8": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16 int4": {"dtype": "bfloat16", "quantization": "int4"},
    "float32 int8-cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "bfloat16 int8-cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "bfloat16 int4 int8-cache": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
}
LOGPROBS_MODES = ("processed_logprobs", "raw_logits", "processed_logits")
QUANTIZED_VARIANTS = ("opt", "llama", "qwen2 layer types")
"""variants that also run with int8 and int4 weights and an int8 cache"""
NUM_BLOCKS = {"mistral window": 14, "qwen2 window by layer": 48, "qwen2 layer types": 48}
"""of variants with sliding windows, whose sequences keep fewer blocks, or blocks for several groups of layers"""
ARRIVING, STEPS_BETWEEN = 6, 4
"""requests added at a time, and steps between two such times"""


@dataclass(frozen=True, slots=True)
class Group:
    """One checkpoint in one storage: the same requests run in each schedule, and must return the same."""

    name: str
    arguments: dict[str, Any]
    schedules: tuple[tuple[str, str], ...]
    """of SCHEDULES"""
    seed: int
    """of the requests"""
    num_random: int = 0
    variant: str | None = None
    """a key of VARIANTS; None: the embedded checkpoint that the arguments name"""


@dataclass(slots=True)
class Section:
    """The report on one schedule of a group."""

    digest: str
    requests: dict[str, str]
    """request name -> short digest"""
    counters: dict[str, int]


Rows = dict[str, bytes]
"""request name -> what it returned, as canonical JSON"""


def groups() -> list[Group]:
    """All groups, in a fixed order."""

    def schedules(first: int, count: int) -> tuple[tuple[str, str], ...]:
        return tuple(SCHEDULES[(first + i) % len(SCHEDULES)] for i in range(count))

    found = []
    for i, (storage, arguments) in enumerate(STORAGES.items()):
        found.append(Group(f"quire-tiny {storage}", {"model": "quire-tiny"} | arguments, schedules(4 * i, 4), i, 16))
    for i, storage in enumerate(("bfloat16", "float32", "bfloat16 int8", "bfloat16 int4 int8-cache")):
        arguments = {"model": "quire-draft", "block_size": 16, "num_gpu_blocks_override": 22} | STORAGES[storage]
        found.append(Group(f"quire-draft {storage}", arguments, schedules(2 * i, 2), 20 + i, 8))
    for i, mode in enumerate(LOGPROBS_MODES):
        arguments = {"model": "quire-tiny", "dtype": "bfloat16", "logprobs_mode": mode}
        found.append(Group(f"quire-tiny bfloat16 {mode}", arguments, schedules(i, 1), 30 + i))
    for i, variant in enumerate(VARIANTS):
        storages = ["float32", "bfloat16"]
        if variant in QUANTIZED_VARIANTS:
            storages += ["bfloat16 int8-cache", "float32 int8", "bfloat16 int4"]
        for j, storage in enumerate(storages):
            num_blocks = NUM_BLOCKS.get(variant, SMALL["num_gpu_blocks_override"])
            arguments = {"tokenizer": "quire-tiny", "num_gpu_blocks_override": num_blocks} | STORAGES[storage]
            found.append(Group(f"{variant} {storage}", arguments, schedules(i + j, 1), 40 + i, 0, variant))
    return found


def exact(value: Any) -> Any:
    """A value that JSON represents without loss: floats in hexadecimal, mappings and log-probabilities as lists."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return [[key, exact(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [exact(item) for item in value]
    if hasattr(value, "decoded_token"):  # a Logprob
        return [exact(value.logprob), value.rank, value.decoded_token]
    return value


def row(output: RequestOutput) -> bytes:
    """All that a request returned, except times and cache hits. Raises RuntimeError if it failed."""
    if output.error is not None:
        raise RuntimeError(f"request {output.request_id!r} failed: {output.error}")
    sequences = [
        [s.index, s.text, s.token_ids, s.finish_reason, s.stop_reason, s.cumulative_logprob, s.logprobs]
        for s in output.outputs
    ]
    return encoded([output.prompt_token_ids, sequences, output.prompt_logprobs])


def beam_row(output: BeamSearchOutput) -> bytes:
    """The same for a beam search."""
    if output.error is not None:
        raise RuntimeError(f"a beam search failed: {output.error}")
    sequences = [[s.tokens, s.cum_logprob, s.text, s.finish_reason, s.stop_reason] for s in output.sequences]
    return encoded(sequences)


def encoded(value: Any) -> bytes:
    """Canonical JSON of a value."""
    return json.dumps(exact(value), ensure_ascii=True, separators=(",", ":")).encode()


def digest_of(parts: Iterable[bytes], size: int = 32) -> str:
    """The BLAKE2b hash of the parts and their lengths, in hexadecimal."""
    state = hashlib.blake2b(digest_size=size)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def run(llm: LLM, requests: Sequence[Request]) -> tuple[Rows, dict[str, int]]:
    """Add the requests a few at a time, in this order, and run them to their end. Returns the rows of all but the
    aborted ones, and two counters: the largest number swapped out at once, and the number aborted after their first
    token."""
    engine, queue, rows = llm.engine, list(reversed(requests)), Rows()
    counters = {"most_swapped": 0, "num_aborted": 0}
    aborts: dict[int, str] = {}
    step = 0
    while queue or engine.has_unfinished_requests():
        for _ in range(min(ARRIVING, len(queue)) if step % STEPS_BETWEEN == 0 else 0):
            request = queue.pop()
            engine.add_request(request.name, request.prompt, request.params)
            if request.abort_after is not None:
                aborts[step + request.abort_after] = request.name
        if step in aborts:
            output = engine.abort_request(aborts[step])
            counters["num_aborted"] += output is not None and any(s.token_ids for s in output.outputs)
        outputs = engine.step()
        rows |= {output.request_id: row(output) for output in outputs if output.finished}
        counters["most_swapped"] = max(counters["most_swapped"], engine.stats().num_swapped)
        step += 1
    aborted = {request.name for request in requests if request.abort_after is not None}
    return {r.name: rows[r.name] for r in requests if r.name not in aborted}, counters


def call(llm: LLM) -> Rows:
    """Use each generating and scoring method of LLM; returns a row for each."""
    greedy, sampled = (
        SamplingParams(temperature=temperature, seed=3, max_tokens=12, logprobs=1) for temperature in (0.0, 0.8)
    )
    text = "import json\n\ndef save(path, data):\n    with open(path, 'w') as file:\n        json."
    messages = [{"role": "user", "content": "What does os.replace do?"}]
    tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}]
    prompt = [5 + 3 * i for i in range(40)]
    both: list[Any] = [text, prompt]
    pin = llm.pin_prefix(prompt[:20])
    rows = {
        "LLM.generate": b"\n".join(map(row, llm.generate(both, [greedy, sampled], use_tqdm=False))),
        "LLM.generate, recommended params": row(llm.generate(text, use_tqdm=False)[0]),
        "LLM.chat": row(llm.chat(messages, greedy, use_tqdm=False)[0]),
        "LLM.chat_prompt with tools": encoded(llm.chat_prompt(messages, tools=tools)),
        "LLM.beam_search": b"\n".join(map(beam_row, llm.beam_search(both, BeamSearchParams(3, 8)))),
        "LLM.perplexity": encoded(llm.perplexity([*both, prompt[:21]], use_tqdm=False)),
    }
    llm.unpin_prefix(pin)
    scores = llm.score_tokens(text, ["dump(data, file)", "load(file)", "xyz"], use_tqdm=False)
    scores += llm.score_tokens([prompt, prompt[:7]], [[9, 8, 7], [4]], use_tqdm=False)
    return rows | {"LLM.score_tokens": encoded([[s.token_ids, s.logprobs, s.ranks] for s in scores])}


def counters_of(llm: LLM) -> dict[str, int]:
    """The engine's counters of its schedule and prefix cache."""
    stats: dict[str, Any] = dataclasses.asdict(llm.engine.stats())
    names = ("num_steps", "num_generated_tokens", "num_preemptions", "num_swapped_blocks", "num_prefix_hit_tokens")
    counters: dict[str, int] = {name: stats[name] for name in names}
    prefix_cache: dict[str, int] = stats["prefix_cache"]
    return counters | prefix_cache


def run_group(group: Group, folder: Path) -> Iterator[tuple[str, Section, list[str]]]:
    """Run one group. Yields the name, the report and the failed checks of each section."""
    model = {} if group.variant is None else {"model": str(save_checkpoint(group.variant, folder))}
    arguments = model | group.arguments
    requests = workload(group.seed, group.num_random)
    if arguments.get("logprobs_mode", "").endswith("logits"):  # refuse to rank samples
        requests = [request for request in requests if getattr(request.params, "best_of", None) is None]
    alone = LLM(**(arguments | ROOMY))
    expected = {r.name: run(alone, [r])[0][r.name] for r in requests if r.runs_alone}
    del alone
    for policy, mode in group.schedules:
        llm = LLM(**(SMALL | arguments | MODES[mode] | {"scheduling_policy": policy}))
        rows, counters = run(llm, requests)
        counters |= counters_of(llm)
        rows |= call(llm)
        problems = [f"{counter} is 0" for counter in EXPECTED[mode] if counters[counter] == 0]
        different = [name for name, wanted in expected.items() if rows[name] != wanted]
        problems += [f"{name!r} is not what it is alone, or in another schedule" for name in different]
        expected = rows | expected
        yield f"{group.name} / {policy}, {mode}", section_of(rows, counters), problems


def section_of(rows: Rows, counters: dict[str, int]) -> Section:
    """The report on these rows."""
    parts = [part for name, got in rows.items() for part in (name.encode(), got)]
    return Section(digest_of(parts), {name: digest_of([got], 8) for name, got in rows.items()}, counters)


def isa() -> str:
    """The instruction set of the kernels in use. No public name of `quire` has it, so the loaded modules are searched
    for the function."""
    for name in sorted(sys.modules, key=len):
        if name.split(".")[0] == "quire" and callable(getattr(sys.modules[name], "isa", None)):
            return str(sys.modules[name].isa())
    return "unknown"


def make_report(chosen: Sequence[Group]) -> dict[str, Any]:
    """Run the groups and return the report; its `problems` are the failed checks."""
    began = time.monotonic()
    sections: dict[str, Any] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for group in chosen:
            try:
                for name, section, failed in run_group(group, Path(folder)):
                    sections[name] = dataclasses.asdict(section)
                    problems += [f"{name}: {check}" for check in failed]
                    seconds = time.monotonic() - began
                    print(f"{seconds:6.1f} s  {section.digest[:16]}  {name}", file=sys.stderr, flush=True)
            except Exception as error:  # the other groups are run all the same
                traceback.print_exc()
                problems.append(f"{group.name}: {type(error).__name__}: {error}")
    parts = [part.encode() for name, section in sections.items() for part in (name, section["digest"])]
    return {
        "digest": digest_of(parts),
        "environment": {
            "isa": isa(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "quire": quire.__version__,
        },
        "problems": problems,
        "sections": sections,
    }


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """The sections of two reports whose digests differ, with their requests that differ, and those that only one
    report has."""
    old, new = before["sections"], after["sections"]
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old or name not in new:
            yield f"{name}: only in the {'new' if name in new else 'old'} report"
        elif old[name]["digest"] != new[name]["digest"]:
            old_digests, new_digests = old[name]["requests"], new[name]["requests"]
            changed = [key for key in old_digests | new_digests if old_digests.get(key) != new_digests.get(key)]
            yield f"{name}: {len(changed)} of {len(new_digests)} requests differ: {', '.join(changed[:8])}"


def selected(names: Iterable[str], only: Sequence[str]) -> set[str]:
    """The names that contain one of the texts; all names if there are no texts."""
    return {name for name in names if not only or any(text in name for text in only)}


def print_comparison(before: dict[str, Any], report: dict[str, Any]) -> bool:
    """Print how the environments and the sections differ; returns whether any section differs."""
    for key, value in before["environment"].items():
        if report["environment"][key] != value:
            print(f"{key} is {report['environment'][key]}, and was {value}", file=sys.stderr)
    found = list(differences(before, report))
    print(*(found or ["no section differs"]), sep="\n", file=sys.stderr)
    return bool(found)


def main() -> int:
    """Run, write and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the report (default: standard output)")
    parser.add_argument("--compare", type=Path, help="report of an earlier run; exit 1 if a section differs from it")
    parser.add_argument(
        "--only", nargs="+", default=[], help="run only the groups whose names contain one of these texts"
    )
    options = parser.parse_args()
    before = None if options.compare is None else json.loads(options.compare.read_text(encoding="utf-8"))
    logging.disable(logging.INFO)
    chosen = selected((group.name for group in groups()), options.only)
    report = make_report([group for group in groups() if group.name in chosen])
    if options.output is None:
        print(json.dumps(report, indent=1))
    else:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"{len(report['sections'])} sections, digest {report['digest']}", *report["problems"], sep="\n", file=sys.stderr
    )
    differs = False
    if before is not None:
        if options.only:
            kept = before["sections"].items()
            before["sections"] = {name: s for name, s in kept if name.split(" / ")[0] in chosen}
        differs = print_comparison(before, report)
    return int(differs or bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
