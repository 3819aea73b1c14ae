"""The limit that reading weights sets to a model on this machine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from quire import kernels
from quire.models.base import CausalLM, Model, PoolingModel
from quire.models.layers.experts import ExpertProducts


@dataclass(frozen=True, slots=True)
class ReadingLimit:
    """What one token of one sequence, or one text that is pooled alone, takes at least."""

    num_bytes: int
    """Of the matrices that this process multiplies by for it; of experts, of those that a token goes to."""
    bytes_per_s: float
    """How fast these matrices were read, by all threads together."""
    is_generating: bool
    """Whether the model generates tokens. If not, it pools texts."""

    def __str__(self) -> str:
        rate = self.bytes_per_s / self.num_bytes
        limit = f"{rate:.0f}" if rate >= 99.5 else f"{rate:.2g}"
        what, at_most = (
            ("token", "tokens/s for one sequence without drafts")
            if self.is_generating
            else ("text", "texts/s one by one")
        )
        return (
            f"a {what} reads {self.num_bytes / 1e9:.3g} GB of weights, here at {self.bytes_per_s / 1e9:.1f} GB/s: "
            f"at most {limit} {at_most}"
        )


def reading_limit(model: Model) -> ReadingLimit | None:
    """Measured on the loaded weights in less than 20 ms, with the threads of the caller's kernels.

    None for weights that stay in a file, which the disk limits, where the backend does not measure it (as for less than
    16 MiB, which caches may hold), and for a model that neither generates nor pools.
    """
    if not isinstance(model, CausalLM | PoolingModel):
        return None
    shares = _shares(model)
    weights = [(weight, shares.get(layer, 1.0)) for _, layer in model.weighted_layers() for weight in _matrices(layer)]
    if any(isinstance(weight, kernels.QuantizedWeight) and weight.in_file for weight, _ in weights):
        return None
    rate = kernels.backend_for("cpu").reading_rate([weight.data for weight, _ in weights])
    num_bytes = int(sum(weight.data.nbytes * share for weight, share in weights))
    return None if rate is None else ReadingLimit(num_bytes, rate, isinstance(model, CausalLM))


def _shares(model: Model) -> Mapping[nn.Module, float]:
    """The share of tokens that go to each expert, by the layers of the expert."""
    mixtures = [module for module in model.modules() if isinstance(module, ExpertProducts)]
    return {layer: mixture.top_k / len(mixture.experts) for mixture in mixtures for layer in mixture.experts.modules()}


def _matrices(layer: nn.Module) -> Iterator[kernels.PackedWeight | kernels.QuantizedWeight | kernels.HeadWeights]:
    """What the layer multiplies all tokens by. Tables of which a step reads some rows are plain tensors."""
    for value in vars(layer).values():
        if isinstance(value, kernels.StackedWeight):
            yield from value.parts
        elif isinstance(value, kernels.PackedWeight | kernels.QuantizedWeight | kernels.HeadWeights):
            yield value
