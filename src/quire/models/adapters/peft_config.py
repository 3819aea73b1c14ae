"""The `adapter_config.json` of PEFT (https://github.com/huggingface/peft), which is not trusted."""

from collections.abc import Callable
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.name_patterns import NamePattern, NamePatterns
from quire.config.hf_config import HFConfig

CONFIG_FILE = "adapter_config.json"

_KNOWN = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "bias",
    "base_model_name_or_path", "init_lora_weights",
    "fan_in_fan_out",  # how the model's own matrix is stored
    # of the training, or of the choice of modules: those that have tensors were chosen
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "runtime_config",
)  # fmt: skip
"""Settings that are read, or that change nothing now. Any other that is not false, null or empty is refused."""
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` that leave the weights of the model as they were."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings that determine what an adapter computes."""

    source: str
    """The file, for error messages."""
    rank: int
    alpha: float
    ranks: tuple[tuple[NamePattern, int], ...]
    """Ranks of the modules whose names match, the first of which counts."""
    alphas: tuple[tuple[NamePattern, float], ...]
    uses_rslora: bool
    targets: tuple[str, ...] | None
    """Names of modules, or ends of them, that have adapters; None if the file gives a regular expression."""
    base_model_name: str | None

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Raises UnsupportedModelError for a setting that Quire does not compute, CheckpointError for a missing or
        malformed file."""
        path = folder / CONFIG_FILE
        if not isfile(path):
            raise CheckpointError(f"{folder} has no {CONFIG_FILE}: not the folder of a PEFT adapter")
        values = HFConfig.read(path)
        if values.text("peft_type") != "LORA":
            raise UnsupportedModelError(f"{path}: peft_type is {_shown(values['peft_type'])}, supported is 'LORA'")
        _check_settings(values)
        name = values.get("base_model_name_or_path")
        return cls(
            source=str(path),
            rank=values.size("r", 8),
            alpha=values.number("lora_alpha", 8),
            ranks=_patterns(values, "rank_pattern", HFConfig.size),
            alphas=_patterns(values, "alpha_pattern", HFConfig.number),
            uses_rslora=values.flag("use_rslora", False),
            targets=_targets(values),
            base_model_name=name if isinstance(name, str) else None,
        )

    def rank_of(self, module: str) -> int:
        """The rank in a module, by its name in the base model."""
        return next((rank for pattern, rank in self.ranks if pattern.ends(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module: alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski 2023)."""
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.ends(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (rank**0.5 if self.uses_rslora else rank)

    def is_target(self, module: str) -> bool:
        """Whether the list of target modules, if there is one, has the module."""
        return self.targets is None or any(module == name or module.endswith(f".{name}") for name in self.targets)


def _check_settings(values: HFConfig) -> None:
    for key, value in values.items():
        if value and key not in _KNOWN:
            raise UnsupportedModelError(
                f"{values.source}: {key[:80]!r} is {_shown(value)}: adapters that need it are not supported"
            )
    if values.text("bias", "none") != "none":
        raise UnsupportedModelError(f"{values.source}: 'bias' is {_shown(values['bias'])}, supported is 'none'")
    start = values.get("init_lora_weights")
    if start not in _STARTS:
        raise UnsupportedModelError(
            f"{values.source}: 'init_lora_weights' is {_shown(start)}, which changes the model's own weights; convert "
            "the adapter with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _targets(values: HFConfig) -> tuple[str, ...] | None:
    targets = values.get("target_modules")
    if targets is None or isinstance(targets, str):
        return None
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise CheckpointError(f"{values.source}: 'target_modules' must be a list of names or a pattern")
    return tuple(targets)


def _patterns(values: HFConfig, key: str, read: Callable[[HFConfig, str], Any]) -> tuple[tuple[NamePattern, Any], ...]:
    """The expressions of rank_pattern or alpha_pattern, as PEFT matches them: the end of a module's name."""
    section = values.section(key)
    if section is None:
        return ()
    patterns = NamePatterns()
    return tuple((patterns.compile(section.source, text), read(section, text)) for text in section)


def _shown(value: object) -> str:
    return repr(value)[:80]
