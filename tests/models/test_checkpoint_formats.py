"""A checkpoint format is a row of a table: here one .npy file for each tensor, and an index."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from quire.common.errors import CheckpointError
from quire.config.checkpoint.formats import FORMATS, CheckpointFormat
from quire.config.checkpoint.tensors import MappedCheckpoint, MappedTensor
from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model, weight_bytes

from .test_against_transformers import LLAMA

PROMPT = [5, 60, 3, 3, 17, 40, 8]


def open_npy(folder: Path) -> MappedCheckpoint:
    tensors = {}
    for name, file in json.loads((folder / "npy.json").read_text()).items():
        array: Any = np.load(folder / file, mmap_mode="r")
        place = (folder / file, array.offset)
        tensors[name] = MappedTensor(name, str(array.dtype), array.shape, array.nbytes, *place)
    return MappedCheckpoint(tensors)


def convert(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for i, tensor in enumerate(tensors.values()):
        np.save(folder / f"{i}.npy", tensor.numpy())
    (folder / "npy.json").write_text(json.dumps({name: f"{i}.npy" for i, name in enumerate(tensors)}))
    (folder / "model.safetensors").unlink()
    fields = json.loads((folder / "config.json").read_text())
    del fields["dtype"]  # so that it has to be found in the tensors
    (folder / "config.json").write_text(json.dumps(fields))


def test_another_checkpoint_format_gives_the_same_logits(
    save_checkpoint: Any, paged_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded() -> tuple[torch.Tensor, int, str]:
        config = ModelConfig.resolve(folder)
        logits = paged_run(load_model(config), config, [PROMPT]).step([len(PROMPT)])[0]
        return logits, weight_bytes(config), config.dtype

    folder, _ = save_checkpoint("LlamaForCausalLM", **LLAMA)
    logits, *others = loaded()
    convert(folder)
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        loaded()
    monkeypatch.setitem(FORMATS, "npy", CheckpointFormat(("*.npy",), open_npy))
    found, *others_found = loaded()
    assert torch.equal(found, logits)
    assert others_found == others
