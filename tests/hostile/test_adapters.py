"""LoRA adapters from strangers: nothing in them is run, little of them is read, and each error is one line."""

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.common.errors import CheckpointError
from quire.config.model import ModelConfig
from quire.models.adapters.peft import inspect_adapter
from tests.hostile.target import PATIENCE, RESULTS
from tests.hostile.test_checkpoints import Payload, entry
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def header(entries: Any, data: bytes = b"", length: int | None = None) -> Callable[[Path], None]:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    size = len(text) if length is None else length
    return lambda folder: rewrite(folder / WEIGHTS, size.to_bytes(8, "little") + text + data)


def rewrite(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def settings(**values: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        given = json.loads((folder / SETTINGS).read_text()) | values
        rewrite(folder / SETTINGS, json.dumps(given).encode())

    return make


def tensors(name: str = A, rank: int = 2, n: int = 0, k: int = 0) -> Callable[[Path], None]:
    """The only module then has factors of this name, rank and size."""

    def make(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS)
        n_own, k_own = stored[A.replace("_A", "_B")].shape[0], stored[A].shape[1]
        a, b = torch.ones(rank, k or k_own), torch.ones(n or n_own, rank)
        (folder / WEIGHTS).unlink()
        save_file({name: a, name.replace("_A", "_B"): b}, folder / WEIGHTS)
        settings(r=rank)(folder)

    return make


def sparse(folder: Path) -> None:
    """A header of 90 MB, of which nothing is stored."""
    with (folder / WEIGHTS).open("r+b") as file:
        file.write((90_000_000).to_bytes(8, "little"))
        file.truncate(0)
        file.seek(0)
        file.write((90_000_000).to_bytes(8, "little"))
        file.truncate(90_000_008)


def in_pickle(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Payload(folder / "RAN")))

    return make


def device(name: str) -> Callable[[Path], None]:
    return lambda folder: ((folder / name).unlink(), (folder / name).symlink_to("/dev/zero"))[1]


MANY = {f"{A}{i}": entry([1], 4 * i, 4 * i + 4) for i in range(20_000)}
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights in a pickle": (in_pickle("adapter_model.bin"), "can run code"),
    "a pickle that is called safetensors": (in_pickle(WEIGHTS), "truncated|not valid JSON"),
    "a header beyond the file": (header({A: entry([2], 0, 8)}, bytes(8), 2**63), "truncated"),
    "an enormous header": (sparse, "not valid JSON"),
    "20,000 tensors": (header(MANY, bytes(80_000)), "is no lora_A or lora_B weight"),
    "overlapping tensors": (
        header({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24)), "overlaps"
    ),
    "a shape beyond every number": (header({A: entry([2**61] * 50_000, 0, 8)}, bytes(8)), "malformed"),
    "a rank of trillions": (header({A: entry([2**40, 0], 0, 0)}), "but not the other factor"),
    "a header nested deeply": (header(b"[" * 1_000_000), "not valid JSON"),
    "a name with line breaks": (header({"a\nb\x1b[31m": entry([2], 0, 8)}, bytes(8)), r"a\\nb\\x1b"),
    "a name of a megabyte": (header({"a" * 2**20: entry([2], 0, 8)}, bytes(8)), "is no lora_A or lora_B weight"),
    "weights that are a device": (device(WEIGHTS), "has no adapter_model.safetensors"),
    "settings that are a device": (device(SETTINGS), "has no adapter_config.json"),
    "settings nested deeply": (lambda f: rewrite(f / SETTINGS, b'{"a":' * 200_000), "not valid JSON"),
    "settings of 20 MB": (lambda f: rewrite(f / SETTINGS, b" " * 20_000_000 + b"{}"), "at most"),
    "settings of a megabyte": (settings(bias="x" * 2**20), "'bias' is"),
    "a setting with line breaks": (settings(**{"a\nb": "c\nd"}), r"'a\\nb' is 'c\\nd'"),
    "code of its own": (settings(auto_mapping={"base_model_class": "os"}, target_parameters=["x"]), "target_p"),
    "a rank beyond memory": (settings(r=2**31 - 1), "adapter_config.json says rank 2147483647"),
    "another model's outputs": (tensors(n=64), r"lora_B \[64, 2\], but this model needs"),
    "another model's inputs": (tensors(k=4096), r"lora_A \[2, 4096\] .*another model's"),
    "another model's layers": (tensors(name=A.replace("layers.0", "layers.99")), "adapts 'model.layers.99.self_attn"),
    "a rank above the largest": (tensors(rank=17), "rank 17 of .* is more than max_lora_rank=16"),
    "no number for alpha": (settings(lora_alpha=float("nan")), "'lora_alpha' is nan"),
    "an exponential pattern": (settings(rank_pattern={"(a|aa)+" * 20 + "!": 1}), "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_offline(tmp_path: Path, name: str) -> None:
    config = ModelConfig.resolve("quire-draft")
    sizes = dict(list(tiny_sizes(config).items())[:1])
    tensors = {key: torch.full_like(each, torch.nan) for key, each in make_tensors(sizes, 2).items()}
    folder = write_adapter(tmp_path / "adapter", tensors, r=2)
    spoil, words = HOSTILE[name]
    spoil(folder)
    start_s = time.monotonic()
    with pytest.raises(CheckpointError, match=words) as caught:
        inspect_adapter(folder, config, 16)
    assert time.monotonic() - start_s < 3 * PATIENCE
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)
    assert not (folder / "RAN").exists(), "code of the adapter was run"
    RESULTS.counts["adapters"] += 1
