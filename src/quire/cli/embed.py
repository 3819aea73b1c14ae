"""Embed texts, one in each line of a file or of standard input.

Each text gives one line of JSON on standard output, with `index`, `text` and `embedding`. With --output, the embeddings
are saved as one NumPy array [num_texts, dimensions] of float32 instead. Empty lines are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.arguments.options import add_engine_arguments, add_model_argument, load_llm
from quire.common.errors import InvalidPromptError, PromptTooLongError, QuireError
from quire.common.params import PoolingParams

if TYPE_CHECKING:
    import numpy as np

    from quire.common.outputs import EmbeddingRequestOutput

_PIECE = 16_384
"""Number of texts that are read and embedded at once, so that memory does not grow with the file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", nargs="+", action="extend", metavar="TEXT", help="one or more texts")
    source.add_argument("--file", metavar="FILE", help="file with one text per line; - or none: standard input")
    parser.add_argument("--output", metavar="FILE.npy", help="save the embeddings as a NumPy array")
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N elements of each embedding")
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale embeddings to length 1 (default: as the model was trained)",
    )
    parser.add_argument(
        "--truncate-prompt-tokens", type=int, metavar="N", help="cut longer texts to N tokens; -1: what the model takes"
    )
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Read the texts, load the model, and print or save the embeddings."""
    params = PoolingParams(
        task="embed",
        dimensions=options.dimensions,
        normalize=options.normalize,
        truncate_prompt_tokens=options.truncate_prompt_tokens,
    )
    if options.output is not None and not options.output.endswith(".npy"):
        raise InvalidPromptError(f"--output {options.output!r}: the name must end in .npy")
    texts = _texts(options)
    first = list(islice(texts, _PIECE))
    if not first:
        raise InvalidPromptError("no text was given: use --text, --file or standard input")
    options.runner = getattr(options, "runner", "pooling")
    llm, start = load_llm(options), 0
    arrays: list[np.ndarray] = []
    piece = first
    while piece:
        try:
            outputs = llm.embed(piece, pooling_params=params)
        except PromptTooLongError as error:
            raise PromptTooLongError(f"of the texts from number {start} on, {error}") from error
        _check(outputs, start)
        if options.output is None:
            for i, (text, output) in enumerate(zip(piece, outputs, strict=True), start=start):
                row = {"index": i, "text": text, "embedding": output.outputs.embedding}
                print(json.dumps(row, ensure_ascii=False))
        else:
            arrays += [output.outputs.data for output in outputs]
        start += len(piece)
        piece = list(islice(texts, _PIECE))
    if options.output is not None:
        _save(arrays, Path(options.output))
    return 0


def _texts(options: argparse.Namespace) -> Iterator[str]:
    if options.text is not None:
        yield from options.text
        return
    name = options.file or "-"
    try:
        with sys.stdin if name == "-" else Path(name).open(encoding="utf-8") as file:
            yield from (text for line in file if (text := line.rstrip("\r\n")).strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPromptError(f"the file {name!r} cannot be read: {error}") from error


def _check(outputs: list[EmbeddingRequestOutput], start: int) -> None:
    for i, output in enumerate(outputs, start=start):
        if output.error is not None:
            raise InvalidPromptError(f"text {i}: {output.error}")


def _save(rows: list[np.ndarray], path: Path) -> None:
    """Write the file whole or not at all."""
    import numpy as np

    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as file:
            np.save(file, np.stack(rows))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise QuireError(f"the embeddings cannot be written to {str(path)!r}: {error}") from error
