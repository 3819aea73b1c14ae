"""Where vLLM has the parameters of pooling, so that `from quire.pooling_params import ...` works."""

from quire.common.params import PoolingParams

__all__ = ["PoolingParams"]
