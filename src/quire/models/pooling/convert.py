"""From models that generate to models that pool."""

from quire.common.errors import UnsupportedModelError
from quire.models.base import CausalLM, Model, PoolingModel
from quire.models.decoder.model import Decoder
from quire.models.pooling.model import Kind, pooled

CONVERSIONS = {"embed": Kind.EMBED, "classify": Kind.CLASSIFY, "reward": Kind.REWARD}


def pooling_class(causal: type[Model], convert: str) -> type[PoolingModel]:
    """The class that runs a generating architecture without its language model head, as `convert` says. Raises
    UnsupportedModelError for one that runs through the library transformers."""
    if not issubclass(causal, CausalLM) or not issubclass(causal, Decoder):
        raise UnsupportedModelError(
            f"convert={convert!r}: not supported for {causal.__name__}, which is no decoder of Quire"
        )
    return pooled(causal, CONVERSIONS[convert])
