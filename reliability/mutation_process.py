"""mutmut, set up for this project, in the folder that reliability/mutants.py makes.

`python -P mutation_process.py run` is `mutmut run`; `... report FILE` prints what came of a file's mutants as JSON.
It differs from mutmut alone in five ways. The sources are those of the folder, although the package is installed in
editable form. The wording of messages is left as it is: of texts, only those without a space are changed. Calls whose
result is not used are left out, and conditions without an operator are negated, both of which mutmut does not do.
The tests of a mutant run fastest first, and what is imported once is left out of their garbage collections, which would
take most of their time. What limits them is processor time, so that a busy machine fails no test; the limit by the
clock is only for tests that wait for ever.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]

import libcst as cst  # noqa: E402
from mutmut.__main__ import cli  # noqa: E402
from mutmut.mutation import mutators  # noqa: E402
from mutmut.mutation.data import SourceFileMutationData  # noqa: E402
from mutmut.mutation.diff_apply import get_diff_for_mutant  # noqa: E402
from mutmut.runners.harness import PytestRunner  # noqa: E402
from mutmut.state import state  # noqa: E402
from mutmut.utils.format_utils import orig_function_and_class_names_from_key  # noqa: E402
from mutmut.workers import isolation  # noqa: E402

CLOCK_FACTOR = 400
"""how much longer a test may take by the clock than in processor time: on a busy machine it may get none for minutes"""


def change_name(node: cst.BaseString) -> Iterator[cst.BaseString]:
    """Another text, where the text is a name and not a sentence."""
    if isinstance(node, cst.SimpleString) and " " not in node.value and len(node.quote) == 1:
        start = len(node.prefix) + 1
        yield node.with_changes(value=f"{node.value[:start]}XX{node.value[start:]}")


def leave_out_call(node: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    """`pass` instead of a call whose result nothing uses."""
    if len(node.body) == 1 and isinstance(node.body[0], cst.Expr):
        value = node.body[0].value
        if isinstance(value.expression if isinstance(value, cst.Await) else value, cst.Call):
            yield node.with_changes(body=[cst.Pass()])


def negate_condition(node: cst.If | cst.CompIf) -> Iterator[cst.If | cst.CompIf]:
    """`if not x` for `if x`, where `x` has no operator that mutmut would change."""
    if isinstance(node.test, cst.Name | cst.Attribute | cst.Call | cst.Subscript):
        negated = cst.UnaryOperation(cst.Not(), node.test)
        yield node.with_changes(test=negated, whitespace_before_test=cst.SimpleWhitespace(" "))


def fastest_first(tests: Iterable[str]) -> list[str]:
    """By the time that each took without a mutation."""
    return sorted(tests, key=lambda test: (state().duration_by_test.get(test, 0.0), test))


def report(path: str) -> Iterator[dict[str, object]]:
    """Every mutant of a file: its function, the lines it takes out and those it puts in, and pytest's exit status."""
    data = SourceFileMutationData(path=path)
    data.load()
    for name, status in data.exit_code_by_key.items():
        function, owner = orig_function_and_class_names_from_key(name)
        lines = [line for line in get_diff_for_mutant(name, path=path).splitlines() if line[:3] not in ("---", "+++")]
        before, after = (
            " ".join(re.sub(r"  # .*", "", line[1:]).strip() for line in lines if line.startswith(sign)).strip()
            for sign in "-+"
        )
        qualified = f"{owner}.{function}" if owner else function
        yield {"name": name, "function": qualified, "line": before, "mutant": after, "status": status}


def main() -> None:
    """Set up, then do what the command line says."""
    if sys.argv[1] == "report":
        json.dump(list(report(sys.argv[2])), sys.stdout)
        return
    operators: Any = mutators.mutation_operators
    operators[:] = [
        *((kind, change) for kind, change in operators if change is not mutators.operator_string),
        (cst.BaseString, change_name),
        (cst.SimpleStatementLine, leave_out_call),
        (cst.If, negate_condition),
        (cst.CompIf, negate_condition),
    ]
    runner: Any = PytestRunner
    arguments, warm_up = runner._pytest_args_regular_run, runner.warm_up

    def warm_up_and_freeze(self: PytestRunner) -> None:
        warm_up(self)
        gc.freeze()

    runner._pytest_args_regular_run = lambda self, tests: arguments(self, fastest_first(tests))
    runner.warm_up = warm_up_and_freeze
    timeouts: Any = isolation
    register = timeouts.register_timeout
    timeouts.register_timeout = lambda pid, timeout_s: register(pid, CLOCK_FACTOR * timeout_s)
    cli()


if __name__ == "__main__":
    main()
