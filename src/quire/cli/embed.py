"""Embed texts, one in each line of a file or of standard input.

Each text gives one line of JSON on standard output, with `index`, `text` and `embedding`. With --output, the embeddings
are saved as one NumPy array [num_texts, dimensions] of float32 instead. Input and output are UTF-8. Empty lines are
skipped. The first text that is invalid ends the command with an error; the lines of the texts before it are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from quire.cli.arguments.options import add_engine_arguments, add_model_argument, load_llm
from quire.common.errors import InvalidPromptError, PromptTooLongError, QuireError
from quire.common.files import replacement
from quire.common.params import PoolingParams

if TYPE_CHECKING:
    import numpy as np

    from quire.common.outputs import EmbeddingRequestOutput
    from quire.interfaces.llm import LLM

_PIECE = 256
"""The most lines that are read before their texts are embedded and printed. Larger pieces are not faster."""
_READ_BYTES = 1024**2
_Text = tuple[str, str]
"""How messages name a text, such as "line 3", and the text."""


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
    from quire.common.progress import progress

    params = PoolingParams(
        task="embed",
        dimensions=options.dimensions,
        normalize=options.normalize,
        truncate_prompt_tokens=options.truncate_prompt_tokens,
    )
    with nullcontext() if options.output is None else _array_file(options.output) as file:
        pieces = filter(None, _pieces(options))
        first = next(pieces, None)
        if first is None:
            raise InvalidPromptError("no text was given: use --text, --file or standard input")
        options.runner = getattr(options, "runner", "pooling")
        llm, indices = load_llm(options, one_engine=False), count()
        arrays: list[np.ndarray] = []
        has_bar = file is not None or not sys.stdout.isatty()
        with progress("Texts", 0, "text") if has_bar else nullcontext(lambda num: None) as advance:
            for piece in chain([first], pieces):
                for text, output in _embedded(llm, piece, params):
                    if file is None:
                        row = {"index": next(indices), "text": text, "embedding": output.outputs.embedding}
                        sys.stdout.buffer.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                    else:
                        arrays.append(output.outputs.data)
                sys.stdout.buffer.flush()
                advance(len(piece))
        if file is not None:
            import numpy

            try:
                numpy.save(file, numpy.stack(arrays))
            except OSError as error:  # numpy's own of a full disk has no number
                raise QuireError(f"the embeddings cannot be written to {options.output!r}: {error}") from error
    return 0


def _pieces(options: argparse.Namespace) -> Iterator[list[_Text]]:
    """Yield the texts in pieces, which may be empty. Raises InvalidPromptError for a text that is not UTF-8, after the
    texts before it."""
    kind, number = ("line" if options.text is None else "text"), 0
    for lines in _lines(options):
        piece: list[_Text] = []
        for line in lines:
            number += 1
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield piece
                raise InvalidPromptError(f"{kind} {number} is not UTF-8: {error}") from error
            if text.strip() or kind == "text":
                piece.append((f"{kind} {number}", text))
        yield piece


def _lines(options: argparse.Namespace) -> Iterator[list[bytes]]:
    """Yield the texts of the command line, or the lines of the input that can be read without waiting."""
    if options.text is not None:
        yield [text.encode("utf-8", "surrogateescape") for text in options.text]
        return
    name, rest = options.file or "-", list[bytes]()  # what was read of a line
    try:
        with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
            while read := os.read(file.fileno(), _READ_BYTES):
                end = read.rfind(b"\n") + 1
                rest.append(read[:end] if end else read)
                if end:
                    lines = b"".join(rest).splitlines()
                    yield from (lines[start : start + _PIECE] for start in range(0, len(lines), _PIECE))
                    rest = [read[end:]]
            yield b"".join(rest).splitlines()
    except OSError as error:
        raise InvalidPromptError(f"the file {name!r} cannot be read: {error}") from error


def _embedded(llm: LLM, piece: Sequence[_Text], params: PoolingParams) -> Iterator[tuple[str, EmbeddingRequestOutput]]:
    """Yield texts and their outputs. Raises the error of the first text that has one, after the texts before it."""
    try:
        outputs = llm.embed([text for _, text in piece], use_tqdm=False, pooling_params=params)
    except PromptTooLongError as error:  # one of the texts is too long, and none was computed
        if len(piece) == 1:
            raise PromptTooLongError(f"{piece[0][0]}: {str(error).removeprefix('prompt 0: ')}") from error
        half = len(piece) // 2
        yield from _embedded(llm, piece[:half], params)
        yield from _embedded(llm, piece[half:], params)
        return
    for (name, text), output in zip(piece, outputs, strict=True):
        if output.error is not None:
            raise InvalidPromptError(f"{name}: {output.error}")
        yield text, output


@contextmanager
def _array_file(name: str) -> Iterator[BinaryIO]:
    """What takes the place of the file `name`, or of the file that a symbolic link `name` points to (`replacement`).
    Raises QuireError if it cannot be created."""
    path = Path(os.path.realpath(name))
    if (path.exists() and not path.is_file()) or not name.endswith(".npy"):
        raise InvalidPromptError(f"--output {name!r}: must be a file, and the name must end in .npy")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(replacement(path))
        except OSError as error:
            raise QuireError(f"the embeddings cannot be written to {name!r}: {error.strerror}") from error
        yield file
