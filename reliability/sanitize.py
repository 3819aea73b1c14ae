"""Build the native code with sanitizers, run its tests, and count the reports.

    python -m reliability.sanitize [address] [thread] [address-tiles] [thread-tiles] [--quick] [--record]
                                   [--tests PATH ...]

`address` finds invalid memory accesses and undefined behaviour, `thread` finds data races; by default all run. They
are built in build/sanitize and do not replace the installed extension. No sanitizer sees what Intel's tiles read and
write, so `address-tiles` and `thread-tiles` have emulated tiles (`QUIRE_EMULATE_AMX`), on which the tests for `amx`
run; the CPU must have AVX-512 BF16. First, faults are planted: kernels get memory that is too short, misaligned, or in
use by another thread, and the sanitizer must report each fault on every instruction set. Then the tests run on every
instruction set of this CPU; with `--quick` those that `make test` chooses. Prints one line of JSON per sanitizer; the
exit status is 1 after a report or a failed test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from reliability import sanitized_site
from reliability.page import record, recorded_rows, table

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "sanitize"

_REPORT = re.compile(r"(?:ERROR: AddressSanitizer|WARNING: ThreadSanitizer|runtime error:)(?:.*\n){,60}", re.MULTILINE)
_ON_EACH_ISA = """
import sys, torch
from quire import _native
_native.use_isa(sys.argv[1])
_native.set_num_threads(4)
"""
_OVERFLOW = """
x, residual = torch.zeros(40), torch.zeros(41)
_native.add(0, x.data_ptr(), residual.data_ptr(), 1, 41)
"""
_MISALIGNED = """
ids = torch.zeros(2, dtype=torch.int64)
table, out = torch.zeros(8), torch.zeros(8)
_native.gather_rows(ids.data_ptr() + 1, 1, table.data_ptr(), 1, table.nbytes, out.data_ptr())
"""
_TILE_OVERFLOW = """
x, weight, out = torch.zeros(2 * 64 - 32).bfloat16(), torch.zeros(64 * 32).bfloat16(), torch.zeros(2, 32)
_native.matmul(1, x.data_ptr(), 64, 2, weight.data_ptr(), 32, 64, 0, out.data_ptr(), 32, 0)
"""
_RACE = """
rows = torch.zeros(257, 2048)  # each task reads the first row that the next one writes
for _ in range(200):
    _native.add(0, rows[1:].data_ptr(), rows.data_ptr(), 256, 2048)
"""


@dataclass(frozen=True)
class Sanitizer:
    """How to run an extension that was built with `QUIRE_SANITIZE`."""

    library: str
    """Library that must be loaded before all others."""
    options: dict[str, str]
    plants: dict[str, str]
    """Maps the text of a report to a program that must cause it."""
    tests: tuple[str, ...]
    prefix: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Of CMake, besides `QUIRE_SANITIZE`."""


# The interpreter and torch are not built with the sanitizers: races are reported only in our code, and leaks are not
# checked.
SANITIZERS = {
    "address": Sanitizer(
        "asan",
        {
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        },
        {"ERROR: AddressSanitizer": _OVERFLOW, "misaligned address": _MISALIGNED},
        ("tests/kernels", "tests/sampling", "tests/models"),
    ),
    "thread": Sanitizer(
        "tsan",
        {"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1:die_after_fork=0"},
        {"data race": _RACE},
        ("tests/kernels",),
        ("setarch", "-R"),  # its shadow memory needs fixed addresses
    ),
}
TILE_TESTS = tuple(
    f"tests/kernels/test_{name}.py"
    for name in ("matmul", "quantized_matmul", "attention", "attention_variants", "encoder_attention", "experts")
)
"""The tests of kernels that multiply on tiles."""
_TILE_PLANTS = {"address": {"heap-buffer-overflow": _TILE_OVERFLOW}, "thread": {}}
SANITIZERS |= {
    f"{name}-tiles": replace(
        each,
        plants=each.plants | _TILE_PLANTS[name],
        tests=("-k", "amx", *TILE_TESTS),
        flags=("-DQUIRE_EMULATE_AMX=ON",),
    )
    for name, each in SANITIZERS.items()
}
QUICK = "--hypothesis-profile=quick", "-m", "not thorough and not slow"
ALL = "--hypothesis-profile=all", "-m", "not thorough"


class SanitizedBuild:
    """The extension built with one sanitizer, and the reports of the processes that ran it."""

    def __init__(self, name: str) -> None:
        """Build the extension."""
        self.name, self.sanitizer, self.folder = name, SANITIZERS[name], BUILT / name
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = [f"-DQUIRE_SANITIZE={name.removesuffix('-tiles')}", "-DQUIRE_WERROR=OFF", *self.sanitizer.flags]
        flags += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.folder}"]
        environment = {"PYTHON": sys.executable, "BUILD_DIR": str(self.folder / "cmake")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = ["bash", str(ROOT / "tools" / "build_inplace.sh"), *flags]
        subprocess.run(command, env=os.environ | environment | {"PATH": path}, check=True, stdout=sys.stderr)
        shutil.copy(sanitized_site.__file__, self.folder / "sitecustomize.py")
        (self.extension,) = self.folder.glob("_native.*.so")
        self._errors = self.folder / "errors.txt"

    def _libraries(self) -> list[str]:
        """Return the libraries that must be loaded first: the sanitizer's, and the one that throws C++ exceptions."""
        linked = subprocess.run(["ldd", str(self.extension)], capture_output=True, text=True, check=True).stdout
        found = {name: re.search(rf"lib{re.escape(name)}\.so\S* => (\S+)", linked)
                 for name in (self.sanitizer.library, "stdc++")}  # fmt: skip
        return [match[1] for match in found.values() if match is not None]

    def run(self, *arguments: str) -> int:
        """Run Python with the extension and return its exit status. Standard error is saved for `reports`."""
        environment = os.environ | self.sanitizer.options | {"LD_PRELOAD": os.pathsep.join(self._libraries())}
        environment |= {"PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, sys.path)])}
        command = [*self.sanitizer.prefix, sys.executable, *arguments]
        with self._errors.open("wb") as errors:
            return subprocess.run(command, env=environment, cwd=ROOT, stderr=errors).returncode

    def reports(self) -> list[str]:
        """Return the sanitizer's reports of the last run."""
        return _REPORT.findall(self._errors.read_text(errors="replace"))

    def isas(self) -> list[str]:
        """Return the instruction sets of this CPU, from the extension."""
        shown = self.folder / "isas.json"
        program = f"""
import json
from quire import _native
assert _native.__file__ == {str(self.extension)!r}
json.dump(_native.available_isas(), open({str(shown)!r}, "w"))
"""
        if self.run("-c", program) != 0:
            raise RuntimeError(f"the extension of {self.name} cannot be loaded: {self._errors.read_text()[-2000:]}")
        names: list[str] = json.loads(shown.read_text())
        return names

    def blind_spots(self) -> list[str]:
        """Return the planted faults that were not reported."""
        return [
            f"{said} on {isa}"
            for said, program in self.sanitizer.plants.items()
            for isa in self.isas()
            if self.run("-c", _ON_EACH_ISA + program, isa) == 0 or not any(said in report for report in self.reports())
        ]

    def test(self, tests: Sequence[str]) -> dict[str, Any]:
        """Run pytest with these arguments and count the outcomes."""
        results = self.folder / "tests.xml"
        results.unlink(missing_ok=True)
        status = self.run("-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", f"--junitxml={results}", *tests)
        suite = ElementTree.parse(results).getroot()[0].attrib if results.exists() else {}
        num = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
        return num | {"reports": len(self.reports()), "status": status}


def main() -> int:
    """Build, run the tests and print the results; the exit status is 1 if a fault was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizers", nargs="*", metavar="SANITIZER", choices=[[], *SANITIZERS])
    parser.add_argument("--tests", nargs="+", help="pytest's arguments, in place of all tests of native code")
    parser.add_argument(
        "--quick", action="store_true", help="without the slow tests, and with a quarter of the examples"
    )
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.sanitizers or SANITIZERS:
        build, tests = SanitizedBuild(name), options.tests or SANITIZERS[name].tests
        isas, unseen = build.isas(), build.blind_spots()
        row = {"sanitizer": name, "isas": " ".join(isas), "date": time.strftime("%Y-%m-%d")}
        row |= {"pytest": " ".join(["(quick)"] * options.quick + list(tests)), "plants not seen": len(unseen)}
        rows.append(row | build.test([*(QUICK if options.quick else ALL), *tests]))
        print(*build.reports(), *unseen, json.dumps({"tool": "sanitize"} | rows[-1]), sep="\n", flush=True)
    if options.record:
        known = {row["sanitizer"]: row for row in recorded_rows("sanitizers") if row["sanitizer"] in SANITIZERS}
        known |= {row["sanitizer"]: row for row in rows}
        record("sanitizers", "make sanitize", table(known[name] for name in SANITIZERS if name in known))
    return int(any(row["plants not seen"] or row["reports"] or row["status"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
