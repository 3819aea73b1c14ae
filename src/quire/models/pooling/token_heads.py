"""Projections of tokens that checkpoints hold beside a model: ColBERT's, and the two of BGE-M3."""

from pathlib import Path

from quire.common.errors import CheckpointError
from quire.config.checkpoint.formats import open_checkpoint, with_folders
from quire.config.checkpoint.sentence_transformers import DenseModule

COLBERT = "linear"
"""Makes a vector of each token (Khattab and Zaharia 2020)."""
VECTORS, WEIGHTS = "colbert_linear", "sparse_linear"
"""Make a vector and a weight of each token (Chen et al. 2024)."""


def token_head_files(folder: Path) -> dict[str, Path]:
    """The files of their own that projections have, by what the names of their tensors are preceded by."""
    files = {f"{name}.": folder / f"{name}.safetensors" for name in (VECTORS, WEIGHTS)}
    return {prefix: path for prefix, path in files.items() if path.is_file()}


def read_token_head(folder: Path, name: str) -> DenseModule:
    """The sizes of a projection, from the headers of the checkpoint. Raises CheckpointError if it has none."""
    tensors = with_folders(open_checkpoint(folder), token_head_files(folder)).tensors
    weight = tensors.get(f"{name}.weight")
    if weight is not None and len(weight.shape) == 2:
        return DenseModule(weight.shape[1], weight.shape[0], f"{name}.bias" in tensors, None, folder)
    if not (folder / f"{name}.pt").exists():
        raise CheckpointError(f"{folder} has no matrix {name}.weight, in its weights or in {name}.safetensors")
    raise CheckpointError(
        f"{folder} has {name}.pt, a pickle, and pickles are never read. Convert it once, where you trust it: python -c "
        '"import torch; from safetensors.torch import save_file; '
        f"save_file(torch.load('{name}.pt', weights_only=True), '{name}.safetensors')\""
    )
