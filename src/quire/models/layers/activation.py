"""Activation functions, and the names that checkpoints use for them."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import softplus

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.kernels.variants import XIELU
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec

ACTIVATION_KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}
"""The names of checkpoints -> those of the kernels."""


def activation_kind(hf: HFConfig, key: str, default: str) -> str:
    """The kernels' name of the activation that config key `key` asks for."""
    name = hf.text(key, default)
    if name not in ACTIVATION_KINDS:
        known = ", ".join(ACTIVATION_KINDS)
        raise UnsupportedModelError(f"{hf.source}: {key!r} is {name[:80]!r}, supported are {known}")
    return ACTIVATION_KINDS[name]


_BETA = 0.5
"""The slope of xIELU at 0."""


class LearnedXIELU(WeightedLayer):
    """xIELU (Huang and Schlag 2025), whose two parameters are stored as numbers that softplus makes positive. It has
    no `forward`: the kernel is called with its `kind`."""

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        spec = WeightSpec((Part((1,)),), torch.float32)
        return {"alpha_p": spec, "alpha_n": spec}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors without data (on the meta device) count as 0: they change no shape."""
        alpha_p, alpha_n = (
            float(softplus(torch.zeros(1) if tensors[name].is_meta else tensors[name]))
            for name in ("alpha_p", "alpha_n")
        )
        self.kind = XIELU(alpha_p, alpha_n + _BETA, _BETA)
