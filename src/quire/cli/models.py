"""List the architectures that Quire runs, by their names in config.json, and the heads that may draft for them."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per architecture or head")


def run(options: argparse.Namespace) -> int:
    """Print each architecture, what it is, in which formats it runs, and how fast; and each kind of draft head."""
    from quire.config.checkpoint.draft_heads import HEADS
    from quire.models.registry import described_models  # loads torch

    models = list(described_models())
    width = max(len(name) for name, *_ in models)
    for name, text, kind, variants in models:
        about: dict[str, object] = {"architecture": name, "description": text, "kind": kind.name}
        about |= {"formats": kind.formats, "share_of_limit": kind.share, "tested_variants": variants}
        print(
            json.dumps(about)
            if options.json
            else f"{name:{width}}  {text} [{kind.name}; tested: {', '.join(variants)}]"
        )
    if not options.json:
        for kind in sorted({kind for *_, kind, _ in models}, key=lambda kind: kind.name):
            print(f"\n{kind.name}: weights in {kind.formats}\n    share of the limit: {kind.share}")
        print("\ndraft heads, by method of speculative_config:")
    for method, (text, needs) in HEADS.items():
        row = {"draft_head": method, "description": text, "needs": needs}
        print(json.dumps(row) if options.json else f"    {method:8}{text}\n{'':12}needs {needs}")
    return 0
