"""Whether a checkpoint generates or pools, what a generating architecture is converted to for pooling, and how a model
that pools makes vectors, where the caller chooses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.common.errors import ConfigError, check_choice, nearest_name
from quire.common.params import POOLING_TASKS, PoolingTask
from quire.config.checkpoint.architectures import POOLING_MODELS

RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify", "reward")
MODULES_FILE = "modules.json"
"""The file of sentence-transformers: a checkpoint that has it was made for embeddings."""
_MODES = {"CLS": "first", "LAST": "last", "MEAN": "mean"}
"""vLLM's names -> ours, as in SentenceModules."""


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """How a model that pools makes vectors, where its files say nothing or something else. The names are vLLM's.

    Raises ConfigError for a value that Quire does not have.
    """

    task: PoolingTask | None = None
    """What is made for requests that name no task; None: the model's first."""
    pooling_type: str | None = None
    """Of which hidden state the vector of a text is made: CLS (the first), LAST, or MEAN (of all)."""
    seq_pooling_type: str | None = None
    """vLLM's newer name of `pooling_type`."""
    use_activation: bool | None = None
    """Whether embeddings are scaled to length 1, and classes and scores are probabilities, where a request leaves it
    open; None: as the files say."""

    def __post_init__(self) -> None:
        if self.task is not None:
            check_choice("pooler_config: task", self.task, POOLING_TASKS)
        for name in ("pooling_type", "seq_pooling_type"):
            if (kind := getattr(self, name)) is not None:
                check_choice(f"pooler_config: {name}", kind, tuple(_MODES))
        if self.pooling_type is not None and self.seq_pooling_type is not None:
            raise ConfigError("pooler_config: pooling_type and seq_pooling_type are the same: give one of them")
        if self.use_activation not in (None, True, False):
            raise ConfigError(f"pooler_config: use_activation={self.use_activation!r}: must be true or false")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> PoolerConfig:
        """Of vLLM's other fields, those that ask for nothing are left out. Raises ConfigError for all others."""
        names = [field.name for field in fields(cls)]
        asked = {name: value for name, value in given.items() if name in names or value not in (None, False, "ALL")}
        if unknown := next((name for name in asked if name not in names), None):
            hint = nearest_name(unknown, names)
            raise ConfigError(f"pooler_config: {unknown!r} is not supported{hint} (allowed: {', '.join(names)})")
        return cls(**asked)

    @property
    def mode(self) -> str | None:
        """The way of pooling, under our name; None: as the files say."""
        kind = self.seq_pooling_type or self.pooling_type
        return None if kind is None else _MODES[kind]


AS_FILES_SAY = PoolerConfig()


def find_runner(
    architecture: str, path: Path, runner: str, convert: str, pooler: PoolerConfig = AS_FILES_SAY
) -> tuple[str, str]:
    """Return the runner, `generate` or `pooling`, and the conversion, `none` for an architecture that pools by itself.

    Raises ConfigError for unknown values, and for those that the architecture cannot have.
    """
    check_choice("runner", runner, RUNNERS)
    check_choice("convert", convert, CONVERSIONS)
    if architecture in POOLING_MODELS:
        if runner == "generate":
            raise ConfigError(f"runner='generate': {architecture} does not generate; leave it at auto")
        if convert not in ("auto", "none"):
            raise ConfigError(f"convert={convert!r}: {architecture} pools as it is; leave it at auto")
        return "pooling", "none"
    if runner == "auto":
        pools = convert not in ("auto", "none") or (convert == "auto" and (path / MODULES_FILE).is_file())
        runner = "pooling" if pools else "generate"
    if runner == "generate":
        if convert not in ("auto", "none"):
            raise ConfigError(f"convert={convert!r} is for pooling: give runner='pooling', or leave both at auto")
        if pooler != AS_FILES_SAY:
            raise ConfigError(f"pooler_config: {architecture} generates; give runner='pooling' to make it pool")
        return runner, "none"
    if convert == "none":
        raise ConfigError(f"runner='pooling': {architecture} must be converted for it; leave convert at auto")
    return runner, "embed" if convert == "auto" else convert
