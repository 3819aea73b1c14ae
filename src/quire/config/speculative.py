"""How drafts are made and verified (speculative decoding)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.common.errors import CheckpointError, ConfigError, check_choice, nearest_name
from quire.common.log import log_early
from quire.config.checkpoint.draft_heads import own_head, resolve_head
from quire.config.model import ModelConfig

PREDICTION = "prediction"
SOURCES = (PREDICTION, "forced", "own", "recent")
HEADS = ("eagle", "eagle3", "mtp")
"""The methods in which a head on the model's hidden states drafts."""
_BY_MODEL = (PREDICTION, "forced", "model")
METHODS: Mapping[str, tuple[str, ...]] = {
    "auto": SOURCES,
    "suffix": SOURCES,
    "ngram": (PREDICTION, "own"),
    "prediction": (PREDICTION,),
    "forced": ("forced",),
    "draft_model": _BY_MODEL,
    **dict.fromkeys(HEADS, _BY_MODEL),
    "off": (),
}
"""By method, where drafts come from: the request's `prediction`, its grammar, its own tokens, its tenant's recent
outputs, another model."""
_ALIASES = dict.fromkeys(("deepseek_mtp", "ernie_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp"), "mtp")
"""vLLM's names of methods for single families."""
_FIELDS: Mapping[str, tuple[str, type[Any]]] = {
    "method": ("method", str),
    "model": ("model", str),
    "num_speculative_tokens": ("num_speculative_tokens", int),
    "prompt_lookup_min": ("min_match", int),
    "prompt_lookup_max": ("max_match", int),
    "suffix_decoding_max_tree_depth": ("max_match", int),
    "adaptive": ("is_adaptive", bool),
    "quantization": ("quantization", str),
    "revision": ("revision", str),
    "draft_tensor_parallel_size": ("draft_tensor_parallel_size", int),
}
"""vLLM's names of fields, and `adaptive`, with ours."""
_WITHOUT_EFFECT = (
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
)  # fmt: skip
"""Fields of vLLM that bound what is tried: here measured times and acceptances do."""
MOST_TOKENS = 32
"""Most drafts of a sequence in a step that can be asked for."""
_LARGEST: Mapping[str, int] = {"num_speculative_tokens": MOST_TOKENS, "min_match": 2**16, "max_match": 2**16}
"""The largest values of our fields that are numbers of tokens, of which each is 1 or more."""

MOST_ROWS = 64
"""Most rows of a step for whose logits there is memory because of drafts: more hardly pay on any machine."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Drafts change the number of steps and never a token."""

    method: str = "auto"
    num_speculative_tokens: int = 8
    """Most drafts of a sequence in a step."""
    min_match: int = 2
    """Least number of tokens that must agree before what followed them is proposed."""
    max_match: int = 16
    """Most tokens that are compared."""
    is_adaptive: bool = True
    """Whether a step verifies only the drafts that are expected to save time; otherwise as many as there are."""
    model: str | None = None
    """The draft model or head: a checkpoint with the same tokens, as `model` of an engine names one."""

    quantization: str | None = None
    """int8 or int4: how the draft model's weights are quantized while they are loaded."""
    revision: str | None = None
    """Branch, tag or commit of a draft model on the hub."""
    draft_tensor_parallel_size: int = 1

    @property
    def has_head(self) -> bool:
        """Whether a head on the model's hidden states drafts."""
        return self.method in HEADS

    @property
    def sources(self) -> tuple[str, ...]:
        """Where drafts are looked up."""
        return METHODS[self.method]

    def num_rows(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """How many drafts of all sequences a step may verify beside their newest tokens."""
        wanted = max_num_seqs * self.num_speculative_tokens if self.sources else 0
        return min(wanted, max(0, MOST_ROWS - max_num_seqs), max_num_batched_tokens - 1)

    def check_no_draft_model(self) -> None:
        """Raise ConfigError if there is a field that only a draft model has."""
        given = [name for name in ("quantization", "revision") if getattr(self, name) is not None]
        if given:
            raise ConfigError(f"speculative_config: {given[0]} is for a draft model, and there is none")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """The config of vLLM's `speculative_config`. Raises ConfigError for fields and values that it does not have."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name in _WITHOUT_EFFECT:
                log_early(f"without effect here: {name} of speculative_config")
                continue
            if name not in _FIELDS:
                raise ConfigError(
                    f"speculative_config: unknown field {name!r}{nearest_name(str(name), _FIELDS)} "
                    f"(allowed: {', '.join(_FIELDS)})"
                )
            ours, kind = _FIELDS[name]
            if value is None:
                continue
            if type(value) is not kind:
                raise ConfigError(f"speculative_config: {name}={value!r} must be of the type {kind.__name__}")
            if value == "":
                raise ConfigError(f"speculative_config: {name}='' must not be empty; leave it out to have none")
            if ours in _LARGEST and not 1 <= value <= _LARGEST[ours]:
                raise ConfigError(f"speculative_config: {name}={value} must be from 1 to {_LARGEST[ours]}")
            if values.setdefault(ours, value) != value:
                same = " and ".join(other for other in _FIELDS if _FIELDS[other][0] == ours)
                raise ConfigError(
                    f"speculative_config: {same} mean the same, but are {values[ours]} and {value}; give one of them"
                )
        if "method" in values:
            values["method"] = _ALIASES.get(values["method"], values["method"])
            check_choice("speculative_config: method", values["method"], tuple(METHODS))
        elif values.get("model") is not None:
            values["method"] = "draft_model"  # until the checkpoint has been looked at
        return cls._checked(values)

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> SpeculativeConfig:
        """With one of the two lengths of a match given, the other one follows it where it must."""
        default = cls()
        low = values.get("min_match", min(default.min_match, values.get("max_match", default.min_match)))
        high = values.get("max_match", max(default.max_match, low))
        config = cls(**values | {"min_match": low, "max_match": high})
        if config.method in ("draft_model", "eagle", "eagle3") and config.model is None:
            raise ConfigError(f"speculative_config: method={config.method!r} needs a model")
        if config.model is not None and config.method not in ("draft_model", *HEADS):
            raise ConfigError(
                f"speculative_config: method={config.method!r} takes no model (draft_model, {', '.join(HEADS)} do)"
            )
        if config.method != "draft_model":
            config.check_no_draft_model()
        ranks = config.draft_tensor_parallel_size
        if ranks != 1:
            raise ConfigError(f"speculative_config: draft_tensor_parallel_size={ranks}: only 1 is supported")
        if config.min_match > config.max_match:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={config.min_match} must be at most "
                f"prompt_lookup_max={config.max_match}"
            )
        return config


AUTOMATIC = SpeculativeConfig()


def draft_model(model: ModelConfig, speculative: SpeculativeConfig, has_method: bool) -> ModelConfig | None:
    """Computes as the model does, and is quantized as its files are or `speculative` says. Raises ConfigError for
    drafts of any kind if the model pools. Without a method, the files tell whether they are a draft head's."""
    try:
        return _draft_model(model, speculative, has_method)
    except (ConfigError, CheckpointError) as error:  # which name what is wrong as if it were the model's
        if str(error).startswith("speculative_config"):
            raise
        raise type(error)(f"speculative_config: {error}") from error


def _draft_model(model: ModelConfig, speculative: SpeculativeConfig, has_method: bool) -> ModelConfig | None:
    if model.runner != "generate" and speculative != AUTOMATIC and speculative.sources:
        raise ConfigError(
            f"speculative_config: {model.model} pools and generates nothing (runner={model.runner!r}), so there is "
            "nothing to draft; leave speculative_config out"
        )
    if speculative.model is None and not speculative.has_head:
        return None
    if speculative.has_head or not has_method:
        head = resolve_head(model, speculative.model, speculative.method if has_method else None)
        if head is not None:
            speculative.check_no_draft_model()
            return head
    draft = ModelConfig.resolve(
        speculative.model,
        dtype=model.dtype,
        quantization=speculative.quantization,
        revision=speculative.revision,
        runner="generate",
    )
    if own_head(draft) in ("eagle", "eagle3"):
        raise ConfigError(f"speculative_config: {draft.model} is a draft head, and no model; leave out 'method'")
    return dataclasses.replace(draft, max_model_len=min(model.max_model_len, draft.max_context_len))
