"""Feed corrupted input to every parser of Quire, and check that each accepts or rejects it as documented.

    python -m reliability.fuzz [TARGET ...] [--seconds 60] [--seed 0] [--atheris] [--record]

Targets are the parsers of files and environment variables (fuzz_files.py, fuzz_gguf.py, fuzz_packed.py,
fuzz_vocabularies.py), of requests (fuzz_requests.py), and of connections and a model's output (fuzz_targets.py); by
default all of them. Valid inputs are cut, repeated, spliced and corrupted, and inputs with a new kind of result are
mutated further. The same seed gives the same inputs. With --atheris (`pip install atheris`), libFuzzer chooses the
inputs by the branches that they reach. Prints one line of JSON per target; an input that makes a parser fail is saved
in a file, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from reliability.fuzz_target import Target
from reliability.fuzz_targets import TARGETS

SLOW_S = 3.0
"""Largest processor time for one input."""
MAX_BYTES = 8192
_MAX_KNOWN = 2000
_INTERESTING = bytes([0, 1, 9, 10, 13, 32, 34, 44, 58, 91, 92, 93, 123, 125, 127, 128, 192, 237, 255])


@dataclass
class Findings:
    """The results of one target."""

    target: str
    inputs: int = 0
    taken: int = 0
    refused: int = 0
    answers: int = 0
    """Number of different results."""
    slowest_ms: float = 0.0
    finds: list[str] = field(default_factory=list)


def mutations(target: Target, rng: random.Random, known: list[bytes], num_good: int) -> Iterator[bytes]:
    """Yield mutated inputs without end, half of them from valid inputs and half from all known inputs."""
    while True:
        data = bytearray(rng.choice(known[:num_good] if rng.random() < 0.5 else known))
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 6))):
            _corrupt(data, rng, known, target.words)
        yield bytes(data[:MAX_BYTES])


def _corrupt(data: bytearray, rng: random.Random, known: list[bytes], words: tuple[bytes, ...]) -> None:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((0, 1, 1, 2, 4, 8, 32, 128)))
    match rng.randrange(9):
        case 0:
            data[start:end] = b""
        case 1:
            data[start:end] = bytes(rng.choices(_INTERESTING, k=end - start))
        case 2:
            data[start:end] = rng.randbytes(end - start)
        case 3 | 4:
            data[start:end] = rng.choice(words)
        case 5:
            data[start:start] = data[start:end] * rng.choice((1, 2, 7, 60))
        case 6:
            other = rng.choice(known)
            cut = rng.randrange(len(other) + 1)
            data[start:] = other[cut:]
        case 7 if start < len(data):
            data[start] ^= 1 << rng.randrange(8)
        case _:
            numbers = list(re.finditer(rb"\d+", data))
            if numbers:
                found = rng.choice(numbers)
                data[found.start() : found.end()] = str(
                    rng.choice((0, -1, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5))
                ).encode()


def attempt(target: Target, data: bytes) -> tuple[str, float]:
    """Run a target and return why it rejected the input (empty if it did not), and the processor time in seconds.

    Raises the target's errors, and AssertionError if it takes too long.
    """
    start_s = time.process_time()
    reason = target.run(data)
    seconds = time.process_time() - start_s
    assert seconds < SLOW_S, f"it takes {seconds:.1f} s"
    return reason, seconds


def fuzz(name: str, *, seed: int, seconds: float = float("inf"), num_inputs: int | None = None) -> Findings:
    """Fuzz a target for a time or a number of inputs; end at the first failure."""
    target, findings = TARGETS[name], Findings(name)
    rng, known = random.Random(f"{name} {seed}"), target.corpus()
    answers, end_s = set[str](), time.monotonic() + seconds
    inputs = mutations(target, rng, known, len(known))
    for data in [*known, b""]:
        attempt(target, data)
    while time.monotonic() < end_s and findings.inputs != num_inputs:
        data = next(inputs)
        findings.inputs += 1
        try:
            reason, took_s = attempt(target, data)
        except Exception as error:
            findings.finds.append(_kept(name, data, error))
            break
        findings.taken += not reason
        findings.refused += bool(reason)
        findings.slowest_ms = max(findings.slowest_ms, round(took_s * 1e3, 1))
        answer = _shape(reason) if reason else f"taken: {_shape(repr(data))}"
        if answer not in answers and len(known) < _MAX_KNOWN:
            answers.add(answer)
            known.append(data)
    findings.answers = len(answers)
    return findings


def _shape(text: str) -> str:
    """Return the text without numbers and quoted parts, which repeat the input."""
    return re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "_", text)[:80]


def _kept(name: str, data: bytes, error: Exception) -> str:
    """Write the input to a file, and return a description of the failure with the file's path."""
    path = Path(tempfile.gettempdir()) / f"quire-fuzz-{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return f"{type(error).__name__}: {str(error)[:200]} ({path})"


def fuzz_with_atheris(name: str, *, seed: int, seconds: float) -> Findings:
    """Fuzz a target in a process of its own, which libFuzzer ends."""
    command = [sys.executable, "-m", "reliability.fuzz_atheris", name, f"-max_total_time={max(1, round(seconds))}"]
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as folder:
        for number, data in enumerate(TARGETS[name].corpus()):
            (Path(folder) / f"known-{number}").write_bytes(data)
        more = [f"-seed={seed + 1}", f"-max_len={MAX_BYTES}", f"-timeout={SLOW_S + 2:.0f}", folder]
        ended = subprocess.run([*command, *more], capture_output=True, text=True)
        findings = Findings(name, answers=len(list(Path(folder).iterdir())))
    done = re.search(r"Done (\d+) runs", ended.stderr)
    findings.inputs = int(done[1]) if done else 0
    if ended.returncode != 0 or done is None:
        findings.finds.append(ended.stderr[-4000:])
    return findings


def main() -> int:
    """Run the targets and print the results; the exit status is 1 if an input made a parser fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", choices=[[], *TARGETS])
    parser.add_argument("--seconds", type=float, default=60, help="seconds for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="let libFuzzer choose the inputs")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Python's warnings about compiled templates
    found = []
    for name in options.targets or TARGETS:
        run = fuzz_with_atheris if options.atheris else fuzz
        found.append(run(name, seed=options.seed, seconds=options.seconds))
        counts = {key: value for key, value in asdict(found[-1]).items() if key != "finds"}
        print(json.dumps(counts), *found[-1].finds, sep="\n", flush=True)
    num_inputs, num_finds = sum(each.inputs for each in found), sum(len(each.finds) for each in found)
    chosen_by = "libFuzzer" if options.atheris else "mutation"
    print(json.dumps({"tool": "fuzz", "inputs": num_inputs, "finds": num_finds, "chosen_by": chosen_by}))
    if options.record:
        _record(options, found)
    return min(1, num_finds)


def _record(options: argparse.Namespace, found: list[Findings]) -> None:
    from reliability.page import record, table

    how = " --atheris" if options.atheris else ""
    command = f"make fuzz ARGS='--seconds {options.seconds:g} --seed {options.seed}{how}'"
    record("fuzz", command, table({**asdict(each), "finds": len(each.finds)} for each in found))


if __name__ == "__main__":
    sys.exit(main())
