"""The inputs of the sampling kernels besides the logits, as tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.checks import is_whole

Holds = Callable[[Tensor], bool]
"""Whether a tensor is on the device of the logits."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Lists of token ids, concatenated."""

    starts: Tensor
    """[num_lists + 1] int64, from 0 on: list i is ids[starts[i]:starts[i + 1]]."""
    ids: Tensor
    """[starts[-1]] int32."""

    def __len__(self) -> int:
        return self.starts.shape[0] - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def between(self, start: int, end: int) -> "TokenLists":
        """Some of the lists."""
        starts = self.starts[start : end + 1]
        return TokenLists(starts - starts[0], self.ids[starts[0] : starts[-1]])

    def fits(self, holds: Holds) -> bool:
        """Whether shapes, strides, dtypes and devices are as stated."""
        starts, ids = (self.starts, (max(1, self.starts.numel()),)), (self.ids, (self.ids.numel(),))
        return is_whole(*starts, torch.int64, holds) and is_whole(*ids, torch.int32, holds)


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes of the logits of each row before a token is drawn, applied in the order of the fields."""

    mask_of: Tensor
    """[num_rows] int32: the index in `masks` of each row's mask; -1: none."""
    masks: Tensor
    """[num_masks, ceil(vocab / 32)] int32: token t may be drawn where bit t % 32 of word t // 32 is set."""
    banned: TokenLists
    """One list per row, of tokens that are not drawn."""
    biased: TokenLists
    """One list per row, of tokens whose logits get a `bias`."""
    bias: Tensor
    """[len(biased.ids)] float32."""
    history_of: Tensor
    """[num_rows] int32: the index in `histories` of each row's history; -1: none, and no penalties."""
    histories: TokenLists
    """The tokens of prompt and output."""
    num_prompt_tokens: Tensor
    """[num_histories] int64: how many tokens of each history, from its start, are the prompt."""
    penalties: Tensor
    """[num_rows, 3] float32. Repetition: logits of tokens in the history are divided by it where positive, else
    multiplied. Frequency: subtracted from the logit for each time the output has the token. Presence: once."""

    def of_rows(self, start: int, end: int) -> "LogitChanges":
        """Those of some rows."""
        banned, biased = (lists.between(start, end) for lists in (self.banned, self.biased))
        first_bias, end_bias = self.biased.starts[start], self.biased.starts[end]
        return replace(
            self,
            mask_of=self.mask_of[start:end],
            banned=banned,
            biased=biased,
            bias=self.bias[first_bias:end_bias],
            history_of=self.history_of[start:end],
            penalties=self.penalties[start:end],
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the native struct."""
        banned, biased, histories = ((lists.starts, lists.ids) for lists in (self.banned, self.biased, self.histories))
        past = (self.history_of, *histories, self.num_prompt_tokens)
        return (self.mask_of, self.masks, *banned, *biased, self.bias, *past, self.penalties)

    def fits(self, num_rows: int, vocab: int, holds: Holds) -> bool:
        """Whether shapes, strides, dtypes and devices are as stated."""
        return (
            all(is_whole(t, (num_rows,), torch.int32, holds) for t in (self.mask_of, self.history_of))
            and is_whole(self.masks, (self.masks.shape[0], -(-vocab // 32)), torch.int32, holds)
            and all(lists.fits(holds) for lists in (self.banned, self.biased, self.histories))
            and len(self.banned) == len(self.biased) == num_rows
            and is_whole(self.bias, self.biased.ids.shape, torch.float32, holds)
            and is_whole(self.num_prompt_tokens, (len(self.histories),), torch.int64, holds)
            and is_whole(self.penalties, (num_rows, 3), torch.float32, holds)
        )


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How each row's token is drawn. Every tensor has one entry per row."""

    temperature: Tensor
    """[num_rows] float64; 0: the likeliest token."""
    top_k: Tensor
    """[num_rows] int64; 0: all."""
    top_p: Tensor
    """[num_rows] float64, 0 to 1."""
    min_p: Tensor
    """[num_rows] float64, 0 to 1."""
    uniform: Tensor
    """[num_rows] float64 in [0, 1): the random numbers."""
    changes: LogitChanges | None = None

    def of_rows(self, start: int, end: int) -> "SamplingTensors":
        """How the tokens of some rows are drawn."""
        return SamplingTensors(
            self.temperature[start:end],
            self.top_k[start:end],
            self.top_p[start:end],
            self.min_p[start:end],
            self.uniform[start:end],
            None if self.changes is None else self.changes.of_rows(start, end),
        )

    def fits(self, num_rows: int, vocab: int, holds: Holds) -> bool:
        """Whether shapes, strides, dtypes and devices are as stated."""
        rows = (num_rows,)
        return (
            all(
                is_whole(t, rows, torch.float64, holds)
                for t in (self.temperature, self.top_p, self.min_p, self.uniform)
            )
            and is_whole(self.top_k, rows, torch.int64, holds)
            and (self.changes is None or self.changes.fits(num_rows, vocab, holds))
        )
