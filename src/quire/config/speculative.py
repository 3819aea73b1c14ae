"""How drafts are made and verified (speculative decoding)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.common.errors import ConfigError

SOURCES = ("prediction", "forced", "own", "recent")
METHODS: Mapping[str, tuple[str, ...]] = {
    "auto": SOURCES,
    "suffix": SOURCES,
    "ngram": ("own",),
    "prediction": ("prediction",),
    "forced": ("forced",),
    "draft_model": ("prediction", "forced", "model"),
    "off": (),
}
"""By method, where drafts come from: the request's `prediction`, its grammar, its own tokens, its tenant's recent
outputs, another model."""
_FIELDS = {
    "method": "method",
    "model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "min_match",
    "prompt_lookup_max": "max_match",
    "suffix_decoding_max_tree_depth": "max_match",
    "adaptive": "is_adaptive",
}
"""vLLM's names of fields, and `adaptive`."""
_MOST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Drafts change the number of steps and never a token."""

    method: str = "auto"
    model: str | None = None
    """The draft model: a checkpoint with the same tokens, as `model` of an engine names one."""
    num_speculative_tokens: int = 8
    """Most drafts of a sequence in a step."""
    min_match: int = 2
    """Least number of tokens that must agree before what followed them is proposed."""
    max_match: int = 16
    """Most tokens that are compared."""
    is_adaptive: bool = True
    """Whether a step verifies only the drafts that are expected to save time; otherwise as many as there are."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Where drafts are looked up."""
        return METHODS[self.method]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """The config of vLLM's `speculative_config`. Raises ConfigError for fields and values that it does not have."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in _FIELDS:
                near = difflib.get_close_matches(name, _FIELDS, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_FIELDS)}"
                raise ConfigError(f"speculative_config: unknown field {name!r}{hint}")
            values[_FIELDS[name]] = value
        if "method" in values and values["method"] not in METHODS:
            raise ConfigError(
                f"speculative_config: method={values['method']!r} is not supported; choose {', '.join(METHODS)}"
            )
        for field in dataclasses.fields(cls):
            wanted = str if field.default is None else type(field.default)
            if field.name in values and type(values[field.name]) is not wanted:
                kind = wanted.__name__
                raise ConfigError(f"speculative_config: {field.name}={values[field.name]!r} must be of the type {kind}")
        config = cls(**values)
        if (config.method == "draft_model") != (config.model is not None):
            raise ConfigError("speculative_config: method='draft_model' needs a model, and no other method takes one")
        if not 1 <= config.num_speculative_tokens <= _MOST_TOKENS:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens={config.num_speculative_tokens}: must be from 1 to "
                f"{_MOST_TOKENS}"
            )
        if not 1 <= config.min_match <= config.max_match:
            raise ConfigError(
                f"speculative_config: {config.min_match} to {config.max_match} tokens must agree: the least must "
                "be 1 or more, and at most the other number"
            )
        return config


AUTOMATIC = SpeculativeConfig()
