"""Models that pool: an encoder, or a decoder without its language model head, and a pooler."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from quire.common.errors import ConfigError, UnsupportedModelError
from quire.config.checkpoint.sentence_transformers import (
    SentenceModules,
    read_activation,
    read_cross_encoder,
    read_modules,
    weights_folder,
)
from quire.config.hf_config import HFConfig
from quire.config.kv_cache import KVCacheSpec, NoCacheSpec
from quire.config.model import ModelConfig
from quire.config.quantization import QUANT_METHOD
from quire.models.base import Model, PoolingModel
from quire.models.decoder.model import Decoder
from quire.models.encoder.model import Encoder
from quire.models.layers.batch_tensors import NO_CACHE, BatchTensors, LayerCache
from quire.models.pooling.answers import TokenDense, reads_tokens, token_dense
from quire.models.pooling.heads import HEAD_NAMES, REWARD_HEAD, HeadShape
from quire.models.pooling.pooler import ClassPooler, EmbeddingPooler, MultiEmbeddingPooler, Pooler, ScorePooler
from quire.models.pooling.token_heads import COLBERT, VECTORS, WEIGHTS, read_token_head, token_head_files
from quire.models.weights.stacked import Stack

_MODULE = re.compile(r"^modules\.(\d+)\.(linear|norm)\.(weight|bias)$")
_OWN = re.compile(rf"(body|pooler\.(steps|head|{VECTORS}|{WEIGHTS}))\.")
"""The model's own names, under which `quire quantize` writes matrices."""
_LAYERS = {"linear": "dense.", "norm": ""}


class Kind(Enum):
    """What a model makes of hidden states."""

    EMBED = "Model"
    CLASSIFY = "ForSequenceClassification"
    TOKEN_CLASSIFY = "ForTokenClassification"
    REWARD = "ForRewardModel"
    STEP_REWARD = "ForProcessRewardModel"
    TOKEN_EMBED = "ForTokenEmbedding"
    """A vector for each token (ColBERT, Khattab and Zaharia 2020), of the projection `linear`."""
    MULTI_EMBED = "ForMultiEmbedding"
    """Embeddings, and vectors and weights of tokens, of the projections `colbert_linear` and `sparse_linear` (BGE-M3,
    Chen et al. 2024)."""


_TOKEN_HEADS = {
    Kind.TOKEN_EMBED: (rf"^{COLBERT}\.", "pooler.steps.0.dense."),
    Kind.MULTI_EMBED: (rf"^({VECTORS}|{WEIGHTS})\.", r"pooler.\1."),
}
"""(regular expression, replacement): the names of projections of tokens."""


class Pooled(PoolingModel):
    """`body`, whose hidden states `pooler` makes vectors of. `pooled` makes subclasses of it."""

    body_class: ClassVar[type[Encoder] | type[Decoder]]
    kind: ClassVar[Kind]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        family = self.body_class
        self.body = family(config) if issubclass(family, Encoder) else family(config, has_head=False)
        self.embed_tokens, self.can_narrow = self.body.embed_tokens, self.body.can_narrow
        self.pooler = _make_pooler(family, self.kind, config)
        self._drops_head = issubclass(family, Decoder) and not (
            reads_tokens(config.hf_config) and not family.ties_embeddings(config)
        )
        """Whether nothing reads the language model head of a checkpoint."""

    @classmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        return cls.body_class.kv_cache_specs(config)

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        return cls.body_class.stacks(config)

    @classmethod
    def folders(cls, config: ModelConfig) -> Mapping[str, Path]:
        if cls.kind not in (Kind.EMBED, Kind.MULTI_EMBED) or config.quant_method == QUANT_METHOD:
            return {}  # `quire quantize` writes all weights into one file
        modules = read_modules(config.path, cls.body_class.shape(config).hidden_size) or SentenceModules(())
        found = {f"modules.{i}.": weights_folder(step) for i, step in enumerate(modules.steps)}
        return found | token_head_files(config.path) if cls.kind is Kind.MULTI_EMBED else found

    def weight_name(self, checkpoint_name: str) -> str | None:
        if _OWN.match(checkpoint_name):
            return checkpoint_name
        if module := _MODULE.match(checkpoint_name):
            return f"pooler.steps.{module[1]}.{_LAYERS[module[2]]}{module[3]}"
        if self.kind in _TOKEN_HEADS and re.match((head := _TOKEN_HEADS[self.kind])[0], checkpoint_name):
            return re.sub(*head, checkpoint_name)
        for pattern, replacement in HEAD_NAMES:
            own, count = re.subn(pattern, replacement, checkpoint_name)
            if count:
                return f"pooler.{own}" if self._has(own) else None
        name = self.body.weight_name(checkpoint_name)
        if name is None or (self._drops_head and name.startswith("lm_head.")):
            return None
        return name if name.startswith("lm_head.") else f"body.{name}"

    @classmethod
    def _has(cls, head_tensor: str) -> bool:
        """Whether models of this kind have such a tensor in their head: others carry it without need."""
        return cls.kind in (Kind.CLASSIFY, Kind.REWARD, Kind.STEP_REWARD) or (
            cls.kind is Kind.TOKEN_CLASSIFY
            and (head_tensor.startswith("head.out.") or cls.body_class.token_head_has_dense)
        )

    def forward(self, batch: BatchTensors, kv: Sequence[LayerCache]) -> Tensor:
        hidden: Tensor = self.body(batch, kv or [NO_CACHE] * len(self.body.layers))
        return hidden


@functools.cache
def pooled(body: type[Encoder] | type[Decoder], kind: Kind) -> type[PoolingModel]:
    """The class of models of that kind."""
    name = body.__name__.removesuffix("ForCausalLM") + kind.value
    values: dict[str, Any] = {"body_class": body, "kind": kind, "fused": body.fused, "can_record": body.can_record}
    values["__doc__"] = Pooled.__doc__
    return type(name, (Pooled,), values)


def pooling_class(causal: type[Model], convert: str) -> type[PoolingModel]:
    """The class that runs a generating architecture without its language model head, as `convert` says. Raises
    UnsupportedModelError for one that runs through the library transformers."""
    if not issubclass(causal, Decoder):
        raise UnsupportedModelError(
            f"convert={convert!r}: not supported for {causal.__name__}, which is no decoder of Quire"
        )
    return pooled(causal, Kind[convert.upper()])


def _make_pooler(family: type[Encoder] | type[Decoder], kind: Kind, config: ModelConfig) -> Pooler:
    hf, hidden_size = config.hf_config, family.shape(config).hidden_size
    if kind is Kind.TOKEN_EMBED:
        _check_no_mode(config)
        return EmbeddingPooler(SentenceModules((), (read_token_head(config.path, COLBERT),)), hidden_size)
    if kind in (Kind.EMBED, Kind.MULTI_EMBED):
        is_causal = not any(isinstance(spec, NoCacheSpec) for spec in family.kv_cache_specs(config))
        modules = read_modules(config.path, hidden_size) or SentenceModules(("last" if is_causal else "mean",))
        modules = _as_chosen(modules, config)
        if modules.num_scores:
            return ScorePooler(modules, hidden_size, _activation(config, kind, modules.num_scores))
        if kind is Kind.EMBED:
            return EmbeddingPooler(modules, hidden_size)
        vectors, weights = (read_token_head(config.path, name) for name in (VECTORS, WEIGHTS))
        first_ids, last_ids = (hf.token_ids(key) or frozenset() for key in ("bos_token_id", "eos_token_id"))
        return MultiEmbeddingPooler(modules, hidden_size, vectors, weights, first_ids, last_ids)
    head, of_tokens = _HEADS[kind](family, hf), kind is not Kind.CLASSIFY
    if of_tokens:
        _check_no_mode(config)
    elif (mode := config.pooler_config.mode) is not None:
        head = replace(head, mode=mode)
    out = _answers(family, config, hidden_size) if kind is Kind.CLASSIFY else None
    labels = num_labels(hf, 1 if kind is Kind.REWARD else 2) if out is None else out.size[0]
    return ClassPooler(head, hidden_size, labels, _activation(config, kind, labels), of_tokens=of_tokens, out=out)


def _as_chosen(modules: SentenceModules, config: ModelConfig) -> SentenceModules:
    """The modules, with the way of pooling that the caller chose. Raises ConfigError for those that have another number
    of them."""
    mode = config.pooler_config.mode
    if mode is None:
        return modules
    if len(modules.modes) != 1:
        _check_no_mode(config)
    return replace(modules, modes=(mode,))


def _check_no_mode(config: ModelConfig) -> None:
    if config.pooler_config.mode is not None:
        raise ConfigError(
            f"pooler_config: the vectors of {config.model} are not made of one hidden state each, so there is no "
            "pooling_type to choose"
        )


def _answers(family: type[Encoder] | type[Decoder], config: ModelConfig, hidden_size: int) -> TokenDense | None:
    """The last layer of a classifier whose classes are tokens; None for others."""
    if not issubclass(family, Decoder):
        return None
    source = "body.embed_tokens.weight" if family.ties_embeddings(config) else "lm_head.weight"
    return token_dense(config, hidden_size, source)


def _sequence_head(family: type[Encoder] | type[Decoder], hf: HFConfig) -> HeadShape:
    return family.sequence_head(hf) if issubclass(family, Encoder) else HeadShape(out_bias=False, mode="last")


def _token_head(family: type[Encoder] | type[Decoder], hf: HFConfig) -> HeadShape:
    return family.token_head(hf) if issubclass(family, Encoder) else HeadShape()


_HEADS: Mapping[Kind, Callable[[type[Encoder] | type[Decoder], HFConfig], HeadShape]] = {
    Kind.CLASSIFY: _sequence_head,
    Kind.TOKEN_CLASSIFY: _token_head,
    Kind.REWARD: lambda family, hf: REWARD_HEAD,
    Kind.STEP_REWARD: lambda family, hf: REWARD_HEAD,
}


def num_labels(hf: HFConfig, default: int) -> int:
    """The number of classes: of `num_labels`, or the names in `id2label`; `default` in a config without both."""
    names = hf.get("id2label")
    return hf.size("num_labels", len(names) if isinstance(names, dict) and names else default)


def _activation(config: ModelConfig, kind: Kind, num_labels: int) -> str | None:
    """What makes probabilities of logits: what a cross-encoder's config names, or else what its kind of problem asks
    for."""
    hf = config.hf_config
    for section in (read_cross_encoder(config.path), hf.section("sentence_transformers")):
        if section is not None and section.get("activation_fn") is not None:
            return read_activation(section, "activation_fn", "")
    if hf.get("sbert_ce_default_activation_function") is not None:
        return read_activation(hf, "sbert_ce_default_activation_function", "")
    problem = hf.text("problem_type", "")
    if kind in (Kind.REWARD, Kind.STEP_REWARD) or problem == "regression":
        return None
    return "sigmoid" if problem == "multi_label_classification" or num_labels == 1 else "softmax"
