"""Whether a checkpoint generates or pools, and what a generating architecture is converted to for pooling."""

from pathlib import Path

from quire.common.errors import ConfigError, check_choice
from quire.config.checkpoint.architectures import POOLING_MODELS

RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify", "reward")
MODULES_FILE = "modules.json"
"""The file of sentence-transformers: a checkpoint that has it was made for embeddings."""


def find_runner(architecture: str, path: Path, runner: str, convert: str) -> tuple[str, str]:
    """Return the runner, `generate` or `pooling`, and the conversion, `none` for an architecture that pools by itself.

    Raises ConfigError for unknown values and for those that the architecture cannot have.
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
        return runner, "none"
    if convert == "none":
        raise ConfigError(f"runner='pooling': {architecture} must be converted for it; leave convert at auto")
    return runner, "embed" if convert == "auto" else convert
