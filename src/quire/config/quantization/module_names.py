"""Names and patterns of modules in a `quantization_config`, which is not trusted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.common.errors import CheckpointError
from quire.config.checkpoint.name_patterns import NamePattern, NamePatterns


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """A list of compressed-tensors: names of modules or of a class, and regular expressions after `re:`."""

    names: frozenset[str]
    patterns: tuple[NamePattern, ...]

    @classmethod
    def read(cls, source: str, values: Mapping[str, Any], key: str, patterns: NamePatterns) -> "ModuleNames":
        """The list at this key, empty where it is absent. Raises as NamePatterns.compile."""
        texts = values.get(key) or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise CheckpointError(f"{source}: {key!r} must be a list of names and patterns")
        expressions = [text.removeprefix("re:") for text in texts if text.startswith("re:")]
        return cls(frozenset(texts), tuple(patterns.compile(f"{source}: {key!r}", text) for text in expressions))

    def match(self, module: str) -> int | None:
        """How these name a linear layer: 0 by its name, 1 by a pattern, 2 by its class; None if they do not."""
        if module in self.names:
            return 0
        if any(pattern.starts(module) for pattern in self.patterns):
            return 1
        return 2 if "Linear" in self.names else None
