"""Files of tiktoken and tekken.json: equal to the tiktoken library on the vocabulary of quire-tiny."""

import base64
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public as published

from quire.common.errors import TokenizerError
from quire.text.tokenizer.formats.byte_level import BYTES, TEKKEN, WORDS
from quire.text.tokenizer.tokenizer import Tokenizer

from .made import EMBEDDED
from .texts import many_texts

NUM_SPECIAL = 30
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
KIMI = [r"[\p{Han}]+", _CASED % ("*", "+"), _CASED % ("+", "*"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"]
KIMI += [r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]


def published_pattern(name: str) -> str:
    """The pattern in the library, whose function would download the ranks too."""
    source = inspect.getsource(getattr(published, name)).replace("load_tiktoken_bpe(", "dict(url=")
    namespace = dict(vars(published)) | {"dict": lambda **_: {}}
    exec(source, namespace)
    return str(namespace[name]()["pat_str"])
