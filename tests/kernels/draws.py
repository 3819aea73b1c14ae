"""Arguments of the sampling kernel."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import LogitChanges, SamplingTensors, TokenLists


def drawing(
    num_rows: int,
    uniform: Tensor | float = 0.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    changes: LogitChanges | None = None,
) -> SamplingTensors:
    """Every row with the same parameters."""
    full = torch.ones(num_rows, dtype=torch.float64)
    cuts = (full * temperature, (full * top_k).long(), full * top_p, full * min_p)
    return SamplingTensors(*cuts, full * uniform, changes)


def lists(*token_ids: list[int]) -> TokenLists:
    starts = torch.tensor([0, *(len(ids) for ids in token_ids)]).cumsum(0)
    return TokenLists(starts, torch.tensor([i for ids in token_ids for i in ids], dtype=torch.int32))


def make_changes(rows: list[dict[str, Any]], vocab: int) -> LogitChanges:
    """Of each row: mask (allowed ids), banned, bias, history (prompt, output), repetition, frequency, presence."""
    masks = [row["mask"] for row in rows if "mask" in row]
    words = torch.zeros(len(masks), -(-vocab // 32) * 32, dtype=torch.bool)
    for i, mask in enumerate(masks):
        words[i, mask] = True
    packed = np.packbits(words.numpy(), axis=1, bitorder="little").view(np.int32)
    histories = [row["history"] for row in rows if "history" in row]

    def numbered(name: str) -> Tensor:
        has = torch.tensor([name in row for row in rows])
        return torch.where(has, has.cumsum(0) - 1, -1).int()

    neutral = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
    penalties = [[row.get(name, otherwise) for name, otherwise in neutral.items()] for row in rows]
    return LogitChanges(
        numbered("mask"),
        torch.from_numpy(packed.reshape(len(masks), -(-vocab // 32))),
        lists(*(row.get("banned", []) for row in rows)),
        lists(*(list(row.get("bias", {})) for row in rows)),
        torch.tensor([b for row in rows for b in row.get("bias", {}).values()], dtype=torch.float32),
        numbered("history"),
        lists(*(prompt + output for prompt, output in histories)),
        torch.tensor([len(prompt) for prompt, _ in histories], dtype=torch.int64),
        torch.tensor(penalties, dtype=torch.float32),
    )
