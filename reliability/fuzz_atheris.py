"""Run one target of reliability.fuzz under libFuzzer: `python -m reliability.fuzz_atheris TARGET [OPTIONS]`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["quire", "jinja2", "json"]):
    from reliability.fuzz import attempt
    from reliability.fuzz_targets import TARGETS


def main() -> None:
    """Run libFuzzer, which ends the process."""
    target = TARGETS[sys.argv.pop(1)]

    def run(data: bytes) -> None:
        attempt(target, data)

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
