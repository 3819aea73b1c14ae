"""Quantize the weights of a checkpoint once, and save it so that later starts only map them.

OUT becomes a folder in Hugging Face layout, which Quire alone reads: `quire chat --model OUT`. The same weights come of
`--quantization` at every load.
"""

import argparse
from pathlib import Path

from quire.config.model import ModelConfig
from quire.config.quantization import QUANTIZATIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", metavar="MODEL", help="folder, hub id, or quire-tiny / quire-draft")
    parser.add_argument("out", metavar="OUT", type=Path, help="the new folder")
    parser.add_argument("--quantization", default="int4", choices=QUANTIZATIONS, help="(default: int4)")
    parser.add_argument("--dtype", default="auto", help="what is computed in: auto, bfloat16 or float32")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def run(options: argparse.Namespace) -> int:
    """Write the folder and say how large its weights are."""
    from quire.config.sizes import format_bytes
    from quire.models.weights.loader import weight_bytes  # loads torch
    from quire.models.weights.saving import save_quantized

    config = ModelConfig.resolve(
        options.model, dtype=options.dtype, quantization=options.quantization, revision=options.revision
    )
    save_quantized(config, options.out)
    print(f"{options.out}: {format_bytes(weight_bytes(config))} of {config.quantization} weights")
    return 0
