"""A section of a config.json, and errors about it."""

import pytest

from quire.config.hf_config import HFConfig

LONG = "x" * 99
SHOWN = "x" * 80 + "(?!x)"
"""A pattern for what a message shows of LONG."""


def section(values):
    return HFConfig(values, "config.json")


def refused(error, message):
    """The error's message begins with this pattern."""
    return pytest.raises(error, match=f"^{message}")


def compressed(weights, **more):
    """A section of compressed-tensors with one group."""
    group = {key: more.pop(key) for key in ("input_activations", "output_activations") if key in more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights} | group}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **more}
