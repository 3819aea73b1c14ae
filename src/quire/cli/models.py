"""List the architectures that Quire runs, by their names in config.json."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per architecture")


def run(options: argparse.Namespace) -> int:
    """Print each architecture and what it is."""
    from quire.models.registry import described_models  # loads torch

    models = dict(described_models())
    width = max(map(len, models))
    for name, text in models.items():
        line = json.dumps({"architecture": name, "description": text}) if options.json else f"{name:{width}}  {text}"
        print(line)
    return 0
