"""What groups of 4-bit weights and of 8-bit inputs cost a checkpoint: perplexity and divergence, as JSON lines.

    python -m tools.group_quality MODEL --text FILE [--max-tokens N]

Weights are rounded as `int4` is, but with a scale for each 32, 64 or 128 inputs, and inputs as kernels round them, with
a scale for as many values; 0 stands for no rounding. All is computed in float32 with the rounded numbers, and compared
as `benchmarks.quality` does; the head stays as it is.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.quality import Scorer, compare, expand
from quire import kernels
from quire.config.model import ModelConfig
from quire.kernels.backends import reference
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.linear import Linear
from quire.text.tokenizer.tokenizer import Tokenizer

PAIRS = ((0, 32), (0, 64), (0, 128), (32, 32), (64, 0), (64, 64), (128, 0), (128, 32), (128, 128))
"""Groups of weights and of inputs."""


def rounded(x: Tensor, group: int, quantize: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> Tensor:
    """The numbers [rows, k] that a rounding in groups stands for."""
    if group == 0:
        return x
    integers, scales = quantize(x, group)
    return (integers.float() * scales[..., None]).flatten(1)[:, : x.shape[1]].contiguous()


def quantize_weight(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """As `int4`, in other groups."""
    with mock.patch.object(reference, "group_size", return_value=group):
        integers, scales, _ = reference.quantize_weight(weight, "int4")
    return integers, scales


def product(linear: Linear, group: int, x: Tensor, batch: BatchTensors) -> Tensor:
    """The layer's product, x [num_tokens, k] being rounded in groups."""
    return Linear._product(linear, rounded(x, group, reference.quantize_rows), batch)


def plain(linear: Linear) -> Tensor:
    """The layer's weight [n, k], which is not quantized."""
    assert isinstance(linear.weight, kernels.PackedWeight)
    return kernels.embedding(torch.arange(linear.weight.n), linear.weight)


def main() -> None:
    """Print a row for each pair of groups."""
    parser = argparse.ArgumentParser(prog="python -m tools.group_quality", description=__doc__)
    parser.add_argument("model", help="checkpoint folder, GGUF file, or embedded checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="file of UTF-8 text")
    parser.add_argument("--max-tokens", type=int, default=1600, help="tokens of the text that are scored")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_path(ModelConfig.resolve(options.model).tokenizer_path)
    token_ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.max_tokens + 1]
    exact, other = (Scorer(options.model, 1024, "float32") for _ in range(2))
    expand(exact.model)
    expand(other.model)
    linears = [each for each in other.model.modules() if isinstance(each, Linear)]
    weights = [plain(linear) for linear in linears]
    for of_weights, of_inputs in PAIRS:
        for linear, weight in zip(linears, weights, strict=True):
            linear.weight = kernels.pack_weight(rounded(weight, of_weights, quantize_weight))
            linear.__dict__["_product"] = partial(product, linear, of_inputs)
        row = compare(exact, other.log_probabilities(token_ids), token_ids)
        print(json.dumps({"weights": of_weights, "inputs": of_inputs} | row), flush=True)


if __name__ == "__main__":
    main()
