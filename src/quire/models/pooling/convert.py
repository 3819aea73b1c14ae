"""Models that generate, converted to pool their hidden states."""

from quire.common.errors import UnsupportedModelError
from quire.models.base import Model, PoolingModel


def pooling_class(model: type[Model], convert: str) -> type[PoolingModel]:
    """The class that pools the hidden states of `model`. Raises UnsupportedModelError if there is none."""
    raise UnsupportedModelError(f"a {model.__name__} cannot be converted for pooling (convert={convert!r})")
