"""A causal language model of the library transformers on Quire's KV cache, attention, projections and head."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.common.errors import UnsupportedModelError
from quire.config.checkpoint.library import library_class, library_config
from quire.config.kv_cache import KVCacheSpec
from quire.config.model import ModelConfig
from quire.kernels.backends.reference_backend import TorchThreads
from quire.models.base import CausalLM
from quire.models.fallback.arithmetic import (
    InnerNorm,
    is_rotary,
    make_tables,
    mlp_like,
    norm_like,
    rotary_step,
    use_rotary_kernel,
)
from quire.models.fallback.attention import NAME, STEP, PagedStep, Survey, attention
from quire.models.fallback.modules import (
    GATE_UP,
    CurrentBatch,
    GivenHidden,
    Head,
    InnerExperts,
    InnerLinear,
    InnerMLP,
    OwnTensors,
    TokenTable,
)
from quire.models.layers.batch_tensors import BatchTensors, LayerCache
from quire.models.layers.embedding import TiedLmHead
from quire.models.layers.linear import LmHead
from quire.models.layers.weighted_layer import WeightedLayer
from quire.models.weights.stacked import STACKS, Stack

_WINDOWS = {"full_attention": False, "sliding_attention": True}
"""The kinds of layers that the library's configs may name, and whether they have a window."""


class TransformersCausalLM(CausalLM):
    """The library's own class of the architecture, never a checkpoint's code.

    Made on torch's meta device. Its `nn.Linear`s, token table and head are replaced by Quire's, so that quantization,
    stored formats and adapters apply; its attention is Quire's, over the paged cache. Everything else is the library's
    modules with torch's arithmetic, so equal bits in another batch are not promised. Running on the meta device shows
    that nothing in Python depends on values, so that decode steps can be recorded. Torch computes on one thread: more
    would wait for the cores on which the threads of the kernels run.

    What the layers keep is found out by running them on the meta device, not read from the config. Raises
    UnsupportedModelError, before weights are read, for a model that keeps or does something else.
    """

    needs_torch: ClassVar[bool] = True
    num_logits_alive: ClassVar[int] = 3
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {GATE_UP: ("gate_proj", "up_proj")}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        model = _empty_model(config)
        try:
            self._renamings = _renamings(model)
            _replace_experts(model)
            survey = _survey(model, config)
            _fill_buffers(model)
            current = CurrentBatch()
            with TorchThreads(1):
                _use_kernels(model, survey, current)
            self._layers = list(_replaced_layers(model, current))
        except UnsupportedModelError as error:
            where = f"{config.model}: transformers' {config.architecture}"
            raise UnsupportedModelError(f"{where} cannot run here: {error}") from error
        self.specs: list[KVCacheSpec] = [survey.specs[layer] for layer in range(len(survey.specs))]
        self._attention = [survey.layers[layer] for layer in range(len(survey.layers))]
        self._current = current
        self.backbone: nn.Module = model.base_model
        setattr(model, model.base_model_prefix, GivenHidden())
        self.head = model
        """The whole model, with the hidden states that it is given in the place of its layers'."""

    @classmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        return cls(config).specs

    @classmethod
    def ties_embeddings(cls, config: ModelConfig) -> bool:
        return bool(cls.copies(config))

    @classmethod
    def copies(cls, config: ModelConfig) -> Mapping[str, str]:
        return _tied(library_class(config.hf_config), library_config(config.hf_config))

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        return STACKS

    def weight_name(self, checkpoint_name: str) -> str | None:
        """As the library renames tensors of checkpoints that its models were published with."""
        name = checkpoint_name
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return super().weight_name(name)

    def weighted_layers(self) -> list[tuple[str, WeightedLayer]]:
        """Every layer with weights, by its name in the library's model."""
        return self._layers

    def forward(self, batch: BatchTensors, kv: Sequence[LayerCache]) -> Tensor:
        given = {"input_ids": batch.token_ids} if batch.embeddings is None else {"inputs_embeds": batch.embeddings}
        named = {name: tensor[None] for name, tensor in given.items() if tensor is not None}
        step = PagedStep(self._attention, batch, kv)
        with TorchThreads(1), self._current.running(batch):
            out = self.backbone(**named, position_ids=batch.positions[None], use_cache=False, **{STEP: step})
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As CausalLM, with whatever the library does to logits."""
        with TorchThreads(1):
            logits: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def _empty_model(config: ModelConfig) -> Any:
    """The library's model on the meta device."""
    import transformers

    transformers.AttentionInterface.register(NAME, attention)
    kind = library_class(config.hf_config)
    where = f"{config.model}: transformers' {config.architecture}"
    if not kind._supports_attention_backend:
        raise UnsupportedModelError(f"{where} does not let its attention be replaced")
    try:
        with torch.device("meta"):
            return kind._from_config(
                library_config(config.hf_config), dtype=getattr(torch, config.dtype), attn_implementation=NAME
            ).eval()
    except Exception as error:  # each class of the library has its own errors for values that do not fit
        raise UnsupportedModelError(f"{where} cannot be made of this config: {' '.join(str(error).split())}") from error


def _renamings(model: Any) -> list[Any]:
    """What the library renames in the checkpoints of a model. Those that depend on other tensors are left out."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    return [each for each in get_model_conversion_mapping(model) if type(each) is WeightRenaming]


def _replace_experts(model: Any) -> None:
    for name, module in list(model.named_modules()):
        if InnerExperts.fits(module):
            model.set_submodule(name, InnerExperts(module))


def _survey(model: Any, config: ModelConfig) -> Survey:
    """Run a step of two tokens, without arithmetic."""
    _check_modules(model)
    survey, layers = Survey(config.dtype), model.base_model
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), survey.watching(module for module in layers.modules() if is_rotary(module)):
            hidden = layers(input_ids=ids, position_ids=ids, use_cache=False, **{STEP: survey}).last_hidden_state
            setattr(model, model.base_model_prefix, GivenHidden())
            model(inputs_embeds=hidden, use_cache=False)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever the library's code raises
        raise UnsupportedModelError(
            f"given only tokens and positions, without the library's cache, it fails: {type(error).__name__} {error}"
        ) from error
    setattr(model, model.base_model_prefix, layers)
    num_layers = model.config.num_hidden_layers
    if set(survey.specs) != set(range(num_layers)):
        without = [str(layer) for layer in range(num_layers) if layer not in survey.specs]
        raise UnsupportedModelError(f"layers without attention keep other states, or none: {', '.join(without)}")
    _check_windows(model.config, survey)
    return survey


def _use_kernels(model: Any, survey: Survey, current: CurrentBatch) -> None:
    """Replace the modules whose arithmetic the kernels have."""
    for name, module in list(model.named_modules()):
        is_inner = name.startswith(f"{model.base_model_prefix}.")
        if own := norm_like(module) or (mlp_like(module, current) if is_inner else None):
            model.set_submodule(name, own)
    steps = {module: rotary_step(module, calls) for module, calls in survey.calls.items()}
    if len(found := {step for step in steps.values() if step is not None}) == 1:
        step = found.pop()
        for module in (module for module, own in steps.items() if own == step):
            make_tables(module, current, step)
        for module in survey.modules:
            use_rotary_kernel(module, current, step)


def _check_modules(model: Any) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            raise UnsupportedModelError(f"{name} ({type(module).__name__}) keeps other states than keys and values")
        if any(parameter.dim() > 2 for parameter in module.parameters(recurse=False)):
            raise UnsupportedModelError(f"{name} ({type(module).__name__}) keeps the matrices of experts in one tensor")
        if hasattr(module, "create_position_ids_from_input_ids"):  # as in RoBERTa: positions begin after the padding's
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) counts positions from the padding token's id"
            )
    if model.base_model is model:
        raise UnsupportedModelError("its layers and its head cannot be separated")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise UnsupportedModelError("it does not take the positions of its tokens")


def _check_windows(config: Any, survey: Survey) -> None:
    """That the kinds of layers that the config names, which the library also expresses in masks, reach attention."""
    window = getattr(config, "sliding_window", None)
    default = ["full_attention" if window is None else "sliding_attention"] * len(survey.specs)
    kinds = getattr(config, "layer_types", None) or default
    for layer, kind in enumerate(kinds):
        given = survey.layers[layer].variant.sliding_window
        if _WINDOWS.get(kind) is not (given is not None):
            raise UnsupportedModelError(
                f"layer {layer} is of the kind {kind!r}, but gives attention the window {given}"
            )


def _tied(kind: Any, config: Any) -> Mapping[str, str]:
    return kind._tied_weights_keys or {} if config.tie_word_embeddings else {}


def _replaced_layers(model: Any, current: CurrentBatch) -> Iterator[tuple[str, WeightedLayer]]:
    """Put Quire's layers into the model, and yield each with its name there. What a head computes before its projection
    stays the library's: rows of logits are not those of the batch."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    if type(head) is not nn.Linear:
        raise UnsupportedModelError(f"its head is a {type(head).__name__}")
    tied = _tied(type(model), model.config)
    if tied not in ({}, {f"{names[head]}.weight": f"{names[table]}.weight"}):
        raise UnsupportedModelError(f"it ties more than its head to its token table: {', '.join(tied)}")
    rows = TokenTable(table, packed=bool(tied))
    for module, name in names.items():
        if module is table:
            model.set_submodule(name, rows)
            yield name, rows.embedding
        elif module is head and tied:
            head._parameters["weight"] = None  # the table's
            model.set_submodule(name, Head(TiedLmHead(rows.embedding), head))
            if (others := OwnTensors(head)).weight_specs():
                yield name, others
        elif module is head:
            own = LmHead(head.in_features, head.out_features, head.weight.dtype, bias=head.bias is not None)
            model.set_submodule(name, Head(own))
            yield name, own
        elif type(module) is nn.Linear and name.startswith(f"{model.base_model_prefix}."):
            inner = InnerLinear(module, current)
            model.set_submodule(name, inner)
            yield name, inner.linear
        elif isinstance(module, InnerNorm):
            yield name, module.norm
        elif isinstance(module, InnerExperts | InnerMLP):
            yield from ((f"{name}.{own}", layer) for own, layer in module.projections())
        elif (others := OwnTensors(module)).weight_specs():
            yield name, others


def _fill_buffers(model: Any) -> None:
    """Make the tables that no checkpoint holds, such as frequencies, as the library does after it made a model without
    memory."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
    model.initialize_weights()
