"""Quantize the weights of a checkpoint once and save them, so that later starts only map them into memory.

MODEL may be quantized by another tool, as GGUF files and checkpoints of GPTQ are: its weights are expanded and
quantized again. OUT becomes a folder in Hugging Face layout that only Quire can read: `quire chat --model OUT`.
Loading the original checkpoint with --quantization gives the same weights, but quantizes them at every start. A layer
for multi-token prediction stays in the original checkpoint, which can be named as the one that drafts.
"""

import argparse
import json
from pathlib import Path

from quire.common.arguments.options import json_object
from quire.config.model import ModelConfig
from quire.config.quantization import QUANTIZATIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, hub id, or quire-tiny / quire-draft")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to create")
    parser.add_argument("--quantization", default="int4", choices=QUANTIZATIONS, help="format (default: int4)")
    parser.add_argument("--dtype", default="auto", help="dtype of the computation: auto, bfloat16 or float32")
    parser.add_argument("--gguf-file", help="which GGUF file of MODEL: its name, or the end of its name")
    parser.add_argument(
        "--hf-overrides", type=json_object, default={}, metavar="JSON", help="values that replace those of config.json"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--runner", default="auto", help="pooling: for a decoder that will pool; default: auto")
    parser.add_argument("--convert", default="auto", help="what a decoder becomes that pools, as for `quire serve`")


def run(options: argparse.Namespace) -> int:
    """Write the folder and print the size of its weights."""
    from quire.config.checkpoint.draft_heads import own_head
    from quire.config.machine import format_bytes
    from quire.models.weights.loader import weight_bytes  # loads torch
    from quire.models.weights.saving import save_quantized
    from quire.text.tokenizer.files import write_tokenizer_files
    from quire.text.tokenizer.gguf import read_gguf_tokenizer

    config = ModelConfig.resolve(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        revision=options.revision,
        gguf_file=options.gguf_file,
        hf_overrides=options.hf_overrides or {},
        runner=options.runner,
        convert=options.convert,
    )
    save_quantized(
        config,
        options.out,
        lambda folder: write_tokenizer_files(read_gguf_tokenizer(config.tokenizer_path), folder),
    )
    print(f"{options.out}: {format_bytes(weight_bytes(config))} of {config.quantization} weights")
    if own_head(config) == "mtp":
        drafts = json.dumps({"method": "mtp", "model": options.model})
        print(f"without the layer for multi-token prediction: to draft with it, add --speculative-config '{drafts}'")
    return 0
