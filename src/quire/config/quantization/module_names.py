"""Names and patterns of modules in a `quantization_config`, which is not trusted."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.common.errors import CheckpointError, UnsupportedModelError

_MAX_PATTERNS = 256
_MAX_PATTERN = 300
_MAX_REPEATS = 4


def compile_pattern(source: str, text: str) -> re.Pattern[str]:
    """Compile a pattern. Raises UnsupportedModelError, which begins with `source`, for one that could take long to
    match, and CheckpointError for one that is malformed."""
    if len(text) > _MAX_PATTERN or len(re.findall(r"[*+{]", text)) > _MAX_REPEATS or re.search(r"\)[*+{]", text):
        raise UnsupportedModelError(
            f"{source} has the pattern {text[:80]!r}; Quire takes up to {_MAX_PATTERN} characters "
            f"and {_MAX_REPEATS} repetitions, none of a group, so that matching takes no time"
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{source} has the pattern {text[:80]!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """A list of compressed-tensors: names of modules or of a class, and regular expressions after `re:`."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def read(cls, source: str, values: Mapping[str, Any], key: str) -> "ModuleNames":
        """The list at this key, empty where it is absent. Raises as compile_pattern."""
        texts = values.get(key) or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise CheckpointError(f"{source}: {key!r} must be a list of names and patterns")
        patterns = [text.removeprefix("re:") for text in texts if text.startswith("re:")]
        if len(patterns) > _MAX_PATTERNS:
            raise UnsupportedModelError(
                f"{source}: {key!r} has {len(patterns)} patterns; Quire takes up to {_MAX_PATTERNS}"
            )
        return cls(frozenset(texts), tuple(compile_pattern(f"{source}: {key!r}", text) for text in patterns))

    def match(self, module: str) -> int | None:
        """How these name a linear layer: 0 by its name, 1 by a pattern, 2 by its class; None if they do not."""
        if module in self.names:
            return 0
        if any(pattern.match(module) for pattern in self.patterns):
            return 1
        return 2 if "Linear" in self.names else None
