"""Write the tables of docs/migrating.md: what becomes of each argument of vLLM.

    python -m tools.migration_tables [--check]

The tables come from Quire's own classes, from src/quire/common/arguments/vllm_arguments.toml, and from vLLM's names in
tests/data/vllm_arguments.json. With --check nothing is written, and the exit status is 1 if the page differs.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.common.arguments.vllm_arguments import Kind, parsers, vllm_arguments
from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.config.args import EngineArgs
from quire.server.config import ServerArgs
from tools.written_tables import write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "migrating.md"
SECTIONS: tuple[tuple[str, Kind, tuple[str, ...], tuple[str, ...]], ...] = (  # the third: vLLM's classes
    (
        "Engine: `LLM(...)`, `EngineArgs`, `quire serve`",
        "engine",
        ("EngineArgs", "FrontendArgs"),
        tuple(f.name for f in dataclasses.fields(EngineArgs)),
    ),
    (
        "Server: `quire serve`",
        "server",
        ("EngineArgs", "FrontendArgs"),
        tuple(f.name for f in dataclasses.fields(ServerArgs)),
    ),
    ("`SamplingParams`", "sampling", ("SamplingParams",), SamplingParams.__struct_fields__),
    (
        "`StructuredOutputsParams`",
        "structured",
        ("StructuredOutputsParams",),
        StructuredOutputsParams.__struct_fields__,
    ),
    ("`BeamSearchParams`", "beam", ("BeamSearchParams",), BeamSearchParams.__struct_fields__),
    ("`PoolingParams`", "pooling", ("PoolingParams",), PoolingParams.__struct_fields__),
)


def tables() -> Iterator[str]:
    """The lines of all tables."""
    vllm = json.loads((ROOT / "tests" / "data" / "vllm_arguments.json").read_text(encoding="utf-8"))
    for title, kind, classes, own in SECTIONS:
        known = {name for one in classes for name in vllm[one]}
        rows = {name: "the same" if name in known else "not in vLLM 0.32" for name in own}
        for name, argument in vllm_arguments(kind).items():
            rows[name] = {
                "renamed": f"renamed: `{argument.to}`",
                "ignored": f"accepted without effect: {argument.reason}",
                "refused": f"refused{_unless(argument.allowed)}: {argument.reason}",
            }[argument.verdict]
        yield from ("", f"### {title}", "", "| argument | in Quire |", "|---|---|")
        yield from (f"| `{name}` | {text} |" for name, text in sorted(rows.items()))
    for option, name in (("--tool-call-parser", "tool_parser"), ("--reasoning-parser", "reasoning_parser")):
        rows = {
            theirs: "not supported" if ours == "other" else f"`{ours}`"
            for ours, names in parsers(name).items()
            for theirs in names
        }
        yield from ("", f"### Further values of `{option}`", "", "| vLLM's parser | format in Quire |", "|---|---|")
        yield from (f"| `{parser}` | {text} |" for parser, text in sorted(rows.items()))
    yield ""


def _unless(allowed: tuple[object, ...]) -> str:
    return f" unless empty or {' or '.join(f'`{value}`' for value in allowed)}" if allowed else " unless empty"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, PAGE, "tools/migration_tables.py", tables()))
