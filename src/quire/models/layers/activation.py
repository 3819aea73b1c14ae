"""Activation functions under the names checkpoints use."""

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig

_KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def activation_kind(hf: HFConfig, key: str, default: str) -> str:
    """The kernels' name of the activation that config key `key` asks for."""
    name = hf.text(key, default)
    if name not in _KINDS:
        raise UnsupportedModelError(f"{hf.source}: {key!r} is {name!r}, supported are {', '.join(_KINDS)}")
    return _KINDS[name]
