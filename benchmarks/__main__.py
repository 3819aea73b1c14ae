"""Measure and write the report: `python -m benchmarks all` does both, in about an hour (less with `--quick`).

The first run installs other engines from their package registries into environments in `--folder`, which takes minutes
for each (llama.cpp is compiled). Engines that cannot be installed, or do not support a precision, are left out.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.embeddings import EMBEDDERS
from benchmarks.engines.interleaved import Row, Run
from benchmarks.engines.peers import ENGINES, ROOT
from benchmarks.figures import FIGURES, PEERS
from benchmarks.report import write_report


def main(argv: Sequence[str] | None = None) -> None:
    """Run the named figures; their rows are printed and replace earlier rows of the same figure in the results."""
    names = tuple(dict.fromkeys(engine.name for engine in (*ENGINES, *(kind for kind, _ in EMBEDDERS))))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "figures", nargs="+", choices=(*FIGURES, "all", "report"), metavar="FIGURE", help=", ".join(FIGURES)
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "benchmarks", help="environments and models")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint of Qwen2-0.5B's shape (default: one is created)")
    parser.add_argument("--engines", nargs="+", choices=names, default=names, metavar="ENGINE", help=", ".join(names))
    parser.add_argument("--peers", action="store_true", help="with `speculation`: other engines' speculation too")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "performance.md", help="Markdown file to write")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the engines too
    folder: Path = options.folder.resolve()
    checkpoint = (options.checkpoint or folder / "qwen2-0.5b").resolve()
    results = folder / "results.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, checkpoint, options.quick, frozenset(options.engines))
    wanted = set(FIGURES) - {PEERS} if "all" in options.figures else set(options.figures)
    if options.peers and "speculation" in wanted:
        wanted.add(PEERS)
    for name, figure in FIGURES.items():
        if name in wanted:
            start, rows = time.perf_counter(), list[Row]()
            for row in figure(run):
                rows.append({"figure": name} | row)
                print(json.dumps(rows[-1]), flush=True)
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
            _replace(results, name, rows)
    if "report" in options.figures or "all" in options.figures:
        write_report(results, options.report)


def _replace(results: Path, figure: str, rows: Sequence[Row]) -> None:
    """Replace one figure's rows in the results file."""
    lines = results.read_text().splitlines() if results.exists() else []
    kept = [line for line in lines if json.loads(line)["figure"] != figure]
    results.write_text("\n".join([*kept, *map(json.dumps, rows)]) + "\n")


if __name__ == "__main__":
    main()
