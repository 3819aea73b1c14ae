"""Write the tables of docs/models.md: each architecture with the variants of it that the tests compare, and each kind.
And write the variants to the file from which `quire models` reads them.

    python -m tools.models_table [--check]

The table comes from the registry and from tests/models. With --check nothing is written, and the exit status is 1 if
the page or the file differs.
"""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from quire.config.checkpoint.architectures import MODELS, POOLING_MODELS
from quire.models.registry import VARIANTS_FILE, ModelKind, described_models
from tests.models.encoders import BOTH_WAYS, DECODERS, ENCODERS, POOLERS
from tests.models.families import NESTED
from tests.models.variants import VARIANTS
from tools.written_tables import write_or_check

HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"


def tested_variants() -> dict[str, list[str]]:
    """The variants of each architecture. Architectures that one class runs share the tests of it."""
    tested: dict[str, list[str]] = {}
    for variant, (architecture, _) in VARIANTS.items():
        tested.setdefault(MODELS[architecture], []).append(variant)
    for variant, architecture in NESTED.items():
        tested.setdefault(MODELS[architecture], []).append(variant)
    for variant, (family, _) in ENCODERS.items():
        for head in HEADS:
            tested.setdefault(POOLING_MODELS[family + head], []).append(variant)
    for family, head in product(DECODERS, HEADS[:2]):
        tested.setdefault(POOLING_MODELS[family + head], []).append(family.lower())
    for variant, (family, _) in BOTH_WAYS.items():
        tested[POOLING_MODELS[f"{family}Model"]].append(variant)
    for architecture, variant in POOLERS.items():
        tested[POOLING_MODELS[architecture]] = [variant]
    made = MODELS | POOLING_MODELS
    return {architecture: sorted(set(tested.get(path, ()))) for architecture, path in made.items()}


def table() -> Iterator[str]:
    """The lines of the table."""
    yield from ("| architecture | models | kind | variants that are tested |", "|---|---|---|---|")
    tested, kinds = tested_variants(), set[ModelKind]()
    for architecture, text, kind, _ in described_models():
        kinds.add(kind)
        variants = ", ".join(f"`{name}`" for name in tested[architecture])
        yield f"| `{architecture}` | {text} | {kind.name} | {variants} |"
    yield from ("", "| kind | formats of weights | share of the limit |", "|---|---|---|")
    for kind in sorted(kinds, key=lambda kind: kind.name):
        yield f"| {kind.name} | {kind.formats} | {kind.share} |"


def write_variants(only_checks: bool) -> int:
    """Write the file, or return 1 if it differs."""
    lines = (f"{json.dumps(name)}: {json.dumps(variants)}" for name, variants in tested_variants().items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if only_checks:
        return int(text != VARIANTS_FILE.read_text(encoding="utf-8"))
    VARIANTS_FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    differs = write_variants("--check" in sys.argv)
    sys.exit(write_or_check(__doc__, PAGE, "tools/models_table.py", table()) or differs)
