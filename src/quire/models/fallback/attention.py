"""Attention as transformers' modules call it: over the paged KV cache, or only to find out what each layer asks for."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from quire.common.errors import UnsupportedModelError
from quire.config.kv_cache import AttentionSpec, attention_spec
from quire.kernels.variants import AttentionVariant
from quire.models.layers.attention import Attention
from quire.models.layers.batch_tensors import BatchTensors, LayerCache

NAME = "quire"
"""What the library's config calls this attention."""
STEP = "quire_step"
"""The keyword argument of a model's `forward` that its layers hand on to `attention`."""
_SOFTCAP, _SINKS = "softcap", "s_aux"
_KNOWN = {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", STEP, _SOFTCAP, _SINKS}
"""Keyword arguments of the library's attention that change nothing here, or that `Survey` and `PagedStep` read."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a module of the library hands to attention, beside queries, keys and values."""

    module: Any
    """The library's attention layer."""
    scale: float
    sliding_window: int | None
    mask: Tensor | None
    others: dict[str, Any]


class Step(Protocol):
    """One forward pass, as attention sees it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, ...] -> as query, with the
        head size of value."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers' AttentionInterface: query, key and value [1, num_heads, num_tokens, head_dim] ->
    [1, num_tokens, num_heads, head_dim], and no probabilities."""
    step: Step | None = others.get(STEP)
    if step is None:
        raise UnsupportedModelError(f"{type(module).__name__} is not handed what `forward` was given for attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = step.attend(query, key, value, AttentionCall(module, scale, sliding_window, attention_mask, others))
    return out[None], None


class PagedStep:
    """Writes keys and values into the cache of the layer, and attends to those of each sequence of the batch."""

    def __init__(self, layers: Sequence[Attention], batch: BatchTensors, kv: Sequence[LayerCache]) -> None:
        self._layers = layers
        self._batch = batch
        self._kv = kv

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Values narrower than keys, as of latent attention, are stored with zeros behind them."""
        layer: int = call.module.layer_idx
        width = value.shape[-1]
        if width < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - width))
        attend = self._layers[layer]
        if (sinks := call.others.get(_SINKS)) is not None:
            attend = Attention(attend.scale, replace(attend.variant, sinks=sinks.float()))
        out: Tensor = attend(query, key, value, self._batch, self._kv[layer])
        return out[..., :width]


class Survey:
    """A forward pass on torch's meta device that collects what each layer asks of attention.

    Raises UnsupportedModelError, from within the model's `forward`, if the kernels do not have it.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.specs: dict[int, AttentionSpec] = {}
        self.layers: dict[int, Attention] = {}
        self.modules: list[Any] = []
        """The library's attention layers."""
        self.calls: dict[nn.Module, list[Arguments]] = {}
        """What each watched module was called with."""

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Keep the calls of these modules in the body."""

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls.setdefault(module, []).append((args, kwargs))

        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            yield

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        module, layer = call.module, getattr(call.module, "layer_idx", None)
        name = type(module).__name__
        asked = [
            key for key, value in call.others.items() if value is not None and value is not False and key not in _KNOWN
        ]
        problems = {
            "has no layer_idx": not isinstance(layer, int),
            "attends more than once": layer in self.specs,
            "sees later tokens too": not getattr(module, "is_causal", False) or call.others.get("is_causal") is False,
            "brings a mask of its own": call.mask is not None,
            f"asks for {', '.join(asked)}": bool(asked),
            "has keys of other heads than its values": key.shape[:2] != value.shape[:2],
            "has keys of another size than its queries": key.shape[2] != query.shape[2],
            "has values wider than its keys": key.shape[2] < value.shape[2],
            "cannot share its keys among its queries": query.shape[1] % key.shape[1] != 0,
        }
        if found := [problem for problem, is_so in problems.items() if is_so]:
            raise UnsupportedModelError(f"{name} {' and '.join(found)}, which Quire's attention does not have")
        assert isinstance(layer, int)
        self.modules.append(module)
        self.specs[layer] = attention_spec(key.shape[1], key.shape[2], self._dtype, call.sliding_window)
        variant = AttentionVariant(call.sliding_window, softcap=call.others.get(_SOFTCAP))
        self.layers[layer] = Attention(call.scale, variant)
        return query.new_empty(*query.shape[:2], value.shape[2])
