"""Write the table of docs/models.md: each architecture, and the variants of it that the tests compare.

    python -m tools.models_table [--check]

The table comes from the registry and from tests/models. With --check nothing is written, and the exit status is 1 if
the page differs.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from quire.config.checkpoint.architectures import MODELS, POOLING_MODELS
from quire.models.registry import described_models
from tests.models.encoders import BOTH_WAYS, DECODERS, ENCODERS, POOLERS
from tests.models.families import NESTED
from tests.models.variants import VARIANTS
from tools.written_tables import write_or_check

HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"


def table() -> Iterator[str]:
    """The lines of the table. Architectures that one class runs share the tests of it."""
    yield from ("| architecture | models | variants that are tested |", "|---|---|---|")
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
    for architecture, text in described_models():
        made = (MODELS | POOLING_MODELS)[architecture]
        variants = ", ".join(f"`{name}`" for name in sorted(set(tested.get(made, ()))))
        yield f"| `{architecture}` | {text} | {variants} |"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, PAGE, "tools/models_table.py", table()))
