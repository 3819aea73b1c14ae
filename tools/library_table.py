"""Write to docs/fallback.md what becomes of each causal language model of the library transformers.

    python -m tools.library_table [--check]

Each architecture is made without memory from its default config, cut to two layers, so what is said holds for the
defaults: other values of a config may be refused, or run where the defaults do not. With --check nothing is written,
and the exit status is 1 if the page differs. It takes about half a minute, and depends on the library's version.
"""

import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire.common.errors import QuireError
from quire.config.checkpoint.architectures import MODELS
from quire.config.model import ModelConfig
from quire.models.fallback.model import TransformersCausalLM
from tools.written_tables import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fallback.md"
REASONS = {
    "other states": "states of state-space models, linear attention or convolutions",
    "experts": "experts in another form than the library's common one",
    "attention be replaced|handed what": "attention that cannot be replaced",
    "nested config": "configs of several parts",
    "counts positions": "positions counted from the padding token's id",
    "sees later|more than once|mask of its own|window": "other attention than causal attention, once in a layer",
}
"""A pattern of the error -> what is refused."""


def outcome(architecture: str, model_type: str) -> str:
    """Nothing if the library's model runs, or else why not."""
    with tempfile.TemporaryDirectory() as folder:
        stated = {"architectures": [architecture], "model_type": model_type, "dtype": "float32"}
        (Path(folder) / "config.json").write_text(json.dumps(stated | {"num_hidden_layers": 2}))
        try:
            TransformersCausalLM(ModelConfig.resolve(folder, model_impl="transformers"))
        except QuireError as error:
            found = (text for pattern, text in REASONS.items() if re.search(pattern, str(error)))
            return next(found, "other reasons, which the error says")
    return ""


def table() -> Iterator[str]:
    """The lines of the table."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    logging.disable()
    names: dict[str, list[str]] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        names.setdefault(name, []).append(model_type)
    found: dict[str, list[str]] = {"": []}
    for name in sorted(names.keys() - MODELS.keys()):
        reasons = [outcome(name, model_type) for model_type in names[name]]
        found.setdefault("" if "" in reasons else reasons[-1], []).append(name)
    native = len(names.keys() & MODELS.keys())
    version = transformers.__version__
    yield f"Of the {len(names)} causal language models of transformers {version}, {native} have a native class,"
    yield f"{len(found[''])} others run with the defaults of their configs, and the rest is refused."
    yield from ("", "| what becomes of them | architectures |", "|---|---|")
    for reason, which in sorted(found.items()):
        yield f"| {f'refused: {reason}' if reason else 'run'} | {', '.join(f'`{name}`' for name in which)} |"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, PAGE, "tools/library_table.py", table()))
