"""Writes a wide twin of a Llama checkpoint: as expensive as a large model, and with the tokens of the small one.

    python -m tools.wide_twin quire-tiny FOLDER
    python -m tools.wide_twin quire-tiny FOLDER --head EAGLE_HEAD OTHER_FOLDER

All tensors are padded with zeros, so that the added channels of the hidden states stay zero, and heads and layers are
added that add zero. The root of the mean square of a wider vector with the same values is smaller by the root of the
ratio of the widths: the norms' weights make up for that, exactly where the ratio is a power of 4. The twin shows what
speculation gains with a draft model as good as the small one's, without large weights to download.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
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
    sizes = _wide(small, hidden, intermediate, heads) | {"num_hidden_layers": layers}
    for name, size in sizes.items():
        if size < small.hf_config.size(name):
            raise ValueError(f"{name}={size} is less than the {small.hf_config.size(name)} of {model}")
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(small.path / "model.safetensors")
    save_file(dict(_tensors(weights, small, sizes)), folder / "model.safetensors", metadata={"format": "pt"})
    for pattern in ("*token*.json", "*.jinja", "generation_config.json"):
        for path in small.path.glob(pattern):
            shutil.copy(path, folder)
    _write_config(small.path, folder, sizes)
    return folder


def write_wide_head(
    model: str, head: Path, folder: Path, *, hidden: int = 1024, intermediate: int = 4096, heads: int = 16
) -> Path:
    """Write a twin of an EAGLE head in the authors' format, trained for the small model: it drafts for the wide twin
    what the head drafts for that one. Return its folder."""
    small = ModelConfig.resolve(model)
    sizes = _wide(small, hidden, intermediate, heads)
    shape_of, scale = _shapes(small, sizes), _scale(small, sizes)
    weights = load_file(head / "model.safetensors")
    parts = weights.pop("fc.weight").chunk(2, dim=1)  # for the token, and for the hidden state
    wide = {"fc.weight": torch.cat([_padded(part, (hidden, hidden)) for part in parts], dim=1)}
    for name, tensor in weights.items():
        is_norm = name.split(".")[-2] in _NORMS
        wide[name] = _padded(tensor * scale if is_norm else tensor, shape_of(name, tensor))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(head, folder, sizes)
    return folder


def _wide(small: ModelConfig, hidden: int, intermediate: int, heads: int) -> dict[str, int]:
    """The sizes of a layer, by their names in config.json."""
    num_heads, num_kv_heads = (small.hf_config.size(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}
    return sizes | {"num_key_value_heads": heads * num_kv_heads // num_heads}


def _write_config(source: Path, folder: Path, sizes: dict[str, int]) -> None:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    epsilon = config["rms_norm_eps"] * config["hidden_size"] / sizes["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config | sizes | {"rms_norm_eps": epsilon}, indent=2) + "\n")


def _scale(small: ModelConfig, sizes: dict[str, int]) -> float:
    return float((small.hf_config.size("hidden_size") / sizes["hidden_size"]) ** 0.5)


def _shapes(small: ModelConfig, sizes: dict[str, int]) -> Callable[[str, Tensor], tuple[int, ...]]:
    """What gives the wide shape of a tensor of this name."""
    config = small.hf_config
    head_dim = config.size("hidden_size") // config.size("num_attention_heads")
    widths = {config.size(name): sizes[name] for name in ("hidden_size", "intermediate_size")}
    queries, keys = (sizes[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    of_heads, hidden = {"q_proj": queries, "k_proj": keys, "v_proj": keys}, sizes["hidden_size"]

    def shape_of(name: str, tensor: Tensor) -> tuple[int, ...]:
        kind = name.split(".")[-2]
        if kind in of_heads:
            return of_heads[kind], hidden
        return (hidden, queries) if kind == "o_proj" else tuple(widths.get(size, size) for size in tensor.shape)

    return shape_of


def _tensors(weights: dict[str, Tensor], small: ModelConfig, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the twin: those of the checkpoint made wider, and those of layers of random numbers."""
    config, generator = small.hf_config, torch.Generator().manual_seed(0)
    shape_of, scale = _shapes(small, sizes), _scale(small, sizes)
    for name, tensor in weights.items():
        kind, shape = name.split(".")[-2], shape_of(name, tensor)
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
    parser.add_argument(
        "--head", type=Path, nargs=2, metavar=("HEAD", "FOLDER"), help="an EAGLE head of the model, too"
    )
    options = parser.parse_args()
    print(write_wide_twin(options.model, options.folder))
    if options.head is not None:
        print(write_wide_head(options.model, *options.head))


if __name__ == "__main__":
    main()
