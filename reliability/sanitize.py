"""Run the tests of native code with it built under sanitizers, and count.

    python -m reliability.sanitize [address] [thread] [--record] [--tests PATH ...]

`address` finds accesses outside of memory and undefined behaviour, `thread` races; both without names. Each is built in
build/sanitize; the extension in use stays as it is. First faults are planted: kernels are given memory that is too
short, crooked, or another thread's, and each instruction set's must be reported. Then the tests run, which use every
instruction set that this CPU has. Prints one JSON line each; a report or a test that fails makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from reliability import sanitized_site
from reliability.page import record, table

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
_RACE = """
rows = torch.zeros(257, 2048)  # each task reads the first row that the next one writes
for _ in range(200):
    _native.add(0, rows[1:].data_ptr(), rows.data_ptr(), 256, 2048)
"""


@dataclass(frozen=True)
class Sanitizer:
    """How to run what is built with `QUIRE_SANITIZE`."""

    library: str
    """that must be in the process before all others"""
    options: dict[str, str]
    plants: dict[str, str]
    """what its report says -> a program that earns it"""
    tests: tuple[str, ...]
    prefix: tuple[str, ...] = ()


# The library keeps its own account of the interpreter and torch, neither of which is built with it: only what our code
# touches counts for races, and only what our code frees for leaks, which are left out.
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
        ("setarch", "-R"),  # its shadow memory has fixed places
    ),
}


class SanitizedBuild:
    """One sanitizer's extension, and the reports of the processes that ran it."""

    def __init__(self, name: str) -> None:
        """Build it."""
        self.name, self.sanitizer, self.folder = name, SANITIZERS[name], BUILT / name
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = [f"-DQUIRE_SANITIZE={name}", "-DQUIRE_WERROR=OFF", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.folder}"]
        environment = {"PYTHON": sys.executable, "BUILD_DIR": str(self.folder / "cmake")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = ["bash", str(ROOT / "tools" / "build_inplace.sh"), *flags]
        subprocess.run(command, env=os.environ | environment | {"PATH": path}, check=True, stdout=sys.stderr)
        shutil.copy(sanitized_site.__file__, self.folder / "sitecustomize.py")
        (self.extension,) = self.folder.glob("_native.*.so")
        self._errors = self.folder / "errors.txt"

    def _libraries(self) -> list[str]:
        """What the extension is linked with and must be loaded first: the sanitizer, and what throws exceptions."""
        linked = subprocess.run(["ldd", str(self.extension)], capture_output=True, text=True, check=True).stdout
        found = {name: re.search(rf"lib{re.escape(name)}\.so\S* => (\S+)", linked)
                 for name in (self.sanitizer.library, "stdc++")}  # fmt: skip
        return [match[1] for match in found.values() if match is not None]

    def run(self, *arguments: str) -> int:
        """Python with the extension in place; its exit status. What it and its children say as errors is kept."""
        environment = os.environ | self.sanitizer.options | {"LD_PRELOAD": os.pathsep.join(self._libraries())}
        environment |= {"PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, sys.path)])}
        command = [*self.sanitizer.prefix, sys.executable, *arguments]
        with self._errors.open("wb") as errors:
            return subprocess.run(command, env=environment, cwd=ROOT, stderr=errors).returncode

    def reports(self) -> list[str]:
        """What the sanitizer said in the last run, each with what follows it."""
        return _REPORT.findall(self._errors.read_text(errors="replace"))

    def isas(self) -> list[str]:
        """The instruction sets of this CPU, as the extension itself says."""
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
        """Planted faults that nobody noticed."""
        return [
            f"{said} on {isa}"
            for said, program in self.sanitizer.plants.items()
            for isa in self.isas()
            if self.run("-c", _ON_EACH_ISA + program, isa) == 0 or not any(said in report for report in self.reports())
        ]

    def test(self, tests: list[str]) -> dict[str, Any]:
        """Run them; how many did what."""
        results = self.folder / "tests.xml"
        results.unlink(missing_ok=True)
        chosen = ["--hypothesis-profile=all", "-m", "not thorough", *tests]
        status = self.run("-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", f"--junitxml={results}", *chosen)
        suite = ElementTree.parse(results).getroot()[0].attrib if results.exists() else {}
        num = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
        return num | {"reports": len(self.reports()), "status": status}


def main() -> int:
    """Build, run and print; 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizers", nargs="*", metavar="SANITIZER", choices=[[], *SANITIZERS])
    parser.add_argument("--tests", nargs="+", help="instead of all that run native code; pytest's arguments")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
    rows = []
    for name in options.sanitizers or SANITIZERS:
        build = SanitizedBuild(name)
        isas, unseen = build.isas(), build.blind_spots()
        counts = build.test(options.tests or list(SANITIZERS[name].tests))
        rows.append({"sanitizer": name, "isas": " ".join(isas), "plants not seen": len(unseen)} | counts)
        print(*build.reports(), *unseen, json.dumps({"tool": "sanitize"} | rows[-1]), sep="\n", flush=True)
    if options.record:
        tests = "; ".join(f"{name}: {' '.join(SANITIZERS[name].tests)}" for name in options.sanitizers or SANITIZERS)
        record("sanitizers", "make sanitize", [f"Tests: {tests}.", "", *table(rows)])
    return int(any(row["plants not seen"] or row["reports"] or row["status"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
