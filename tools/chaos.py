"""Make things fail on purpose, and see that nothing else does.

    python tools/chaos.py injections [--count 10000] [--seed 1]

Each kind of chaos ends with a summary of counts and one line of JSON; the exit status is 1 if anything was wrong.
"""

import argparse
import importlib
import sys

KINDS = {
    "injections": "faults at the named points of an engine in this process, one after another",
}
"""each is a module `chaos_<kind>` beside this one, with `add_arguments` and `run`"""


def main() -> int:
    """Run the kind that is named; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="KIND", required=True)
    for kind, what in KINDS.items():
        module = importlib.import_module(f"chaos_{kind}")
        command = commands.add_parser(
            kind, help=what, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
