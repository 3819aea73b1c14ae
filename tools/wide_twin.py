"""Writes a wide twin of a Llama checkpoint: as expensive as a large model, and with the tokens of the small one.

    python -m tools.wide_twin quire-tiny FOLDER

All tensors are padded with zeros, so that the added channels of the hidden states stay zero, and heads and layers are
added that add zero. The root of the mean square of a wider vector with the same values is smaller by the root of the
ratio of the widths: the norms' weights make up for that, exactly where the ratio is a power of 4. The twin shows what
speculation gains with a draft model as good as the small one's, without large weights to download.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.model import ModelConfig

_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
_ADD_NOTHING = ("o_proj", "down_proj")
_STD = 0.02


def write_wide_twin(
    model: str, folder: Path, *, hidden: int = 1024, intermediate: int = 4096, heads: int = 16, layers: int = 31
) -> Path:
    """Write the twin, and return its folder. The sizes default to half a billion parameters."""
    small = ModelConfig.resolve(model)
    sizes: dict[str, int] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        * small.hf_config.size("num_key_value_heads")
        // small.hf_config.size("num_attention_heads"),
        "num_hidden_layers": layers,
    }
    for name, size in sizes.items():
        if size < small.hf_config.size(name):
            raise ValueError(f"{name}={size} is less than the {small.hf_config.size(name)} of {model}")
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(small.path / "model.safetensors")
    save_file(dict(_tensors(weights, small, sizes)), folder / "model.safetensors", metadata={"format": "pt"})
    for pattern in ("*token*.json", "*.jinja", "generation_config.json"):
        for path in small.path.glob(pattern):
            shutil.copy(path, folder)
    config: dict[str, Any] = json.loads((small.path / "config.json").read_text())
    epsilon = config["rms_norm_eps"] * config["hidden_size"] / hidden
    (folder / "config.json").write_text(json.dumps(config | sizes | {"rms_norm_eps": epsilon}, indent=2) + "\n")
    return folder


def _tensors(weights: dict[str, Tensor], small: ModelConfig, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the twin: those of the checkpoint made wider, and those of layers of random numbers."""
    config, generator = small.hf_config, torch.Generator().manual_seed(0)
    head_dim = weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // config.size("num_attention_heads")
    widths = {config.size(name): sizes[name] for name in ("hidden_size", "intermediate_size")}
    queries, keys = (sizes[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    hidden, scale = sizes["hidden_size"], (config.size("hidden_size") / sizes["hidden_size"]) ** 0.5
    of_heads = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name, tensor in weights.items():
        kind = name.split(".")[-2]
        shape = tuple(widths.get(size, size) for size in tensor.shape)
        if kind in of_heads:
            shape = of_heads[kind], hidden
        elif kind == "o_proj":
            shape = hidden, queries
        yield name, _padded(tensor * scale if kind in _NORMS else tensor, shape)
        first, *others = range(config.size("num_hidden_layers") - 1, sizes["num_hidden_layers"])
        for layer in others if f"layers.{first}." in name else ():
            values = torch.randn(shape, generator=generator) * _STD
            added = torch.zeros(shape) if kind in _ADD_NOTHING else torch.ones(shape) if kind in _NORMS else values
            yield name.replace(f"layers.{first}.", f"layers.{layer}."), added.to(tensor.dtype)


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    result = torch.zeros(shape, dtype=tensor.dtype)
    result[tuple(slice(size) for size in tensor.shape)] = tensor
    return result


def main() -> None:
    """Write a twin of the default sizes."""
    parser = argparse.ArgumentParser(prog="python -m tools.wide_twin", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="quire-tiny, or the folder of a Llama checkpoint in one file")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(write_wide_twin(options.model, options.folder))


if __name__ == "__main__":
    main()
