"""Count the lines of code of `src/quire` and `csrc`, and fail if they exceed the budget in pyproject.toml.

Blank lines, comments and docstrings do not count. `line_budget` may be raised: a reviewer then sees the growth as a
line of the change. Files of more than 400 lines (everything counted) are listed but allowed.
"""

import argparse
import ast
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_FILE_LINES = 400
SKIPPED_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_CXX_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def python_code_lines(text: str) -> int:
    """Count the lines of Python source with code; a string that is a whole statement counts as documentation."""
    documentation = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(StringIO(text).readline)
        if token.type not in SKIPPED_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - documentation)


def cxx_code_lines(text: str) -> int:
    """Count the lines of C++ source with code."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else "\n" * found.count("\n")

    return sum(bool(line.strip()) for line in _CXX_COMMENT_OR_STRING.sub(blank, text).splitlines())


def sources(root: Path) -> Iterator[Path]:
    """Yield the files that the budget covers, in a fixed order."""
    yield from sorted((root / "src" / "quire").rglob("*.py"))
    yield from sorted(path for path in (root / "csrc").rglob("*") if path.suffix in {".h", ".cpp"})


def count(path: Path) -> int:
    """Count the lines of code of one file."""
    text = path.read_text(encoding="utf-8")
    return python_code_lines(text) if path.suffix == ".py" else cxx_code_lines(text)


def folder_of(path: Path) -> str:
    """Return the row of the table for a file: `src/quire/engine`, `csrc`, ..."""
    depth = 3 if path.parts[0] == "src" else 1
    return "/".join(path.parent.parts[:depth])


def main() -> int:
    """Print the table; the exit status is 1 if the budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to count (default: this one)")
    root: Path = parser.parse_args().root
    budget: int = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["quire"]["line_budget"]

    num_lines: Counter[str] = Counter()
    long_files = []
    for path in sources(root):
        relative = path.relative_to(root)
        num_lines[folder_of(relative)] += count(path)
        total_lines = path.read_text(encoding="utf-8").count("\n")
        if total_lines > LONG_FILE_LINES:
            long_files.append(f"{relative} ({total_lines} lines)")

    for folder, lines in sorted(num_lines.items()):
        print(f"{lines:7,}  {folder}")
    print(f"{num_lines.total():7,}  lines of code, budget {budget:,}")
    for line in long_files:
        print(f"longer than {LONG_FILE_LINES} lines: {line}")
    if num_lines.total() > budget:
        print(f"over budget by {num_lines.total() - budget:,} lines: simplify, or raise tool.quire.line_budget")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
