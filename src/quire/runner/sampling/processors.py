"""Running the callers' own logits processors, which a Draw names."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import ScheduledSequence
from quire.common.errors import InvalidParamsError
from quire.runner.sampling.draw_tensors import DrawTensors, draw_rows
from quire.runner.sampling.named_processor import NamedProcessor


def run_processors(
    logits: Tensor, draws: DrawTensors, sequences: Sequence[ScheduledSequence]
) -> tuple[Tensor, dict[int, str]]:
    """Return a copy of the logits [num_rows, vocab] of the draws of `sequences`, in which the rows with processors are
    changed, and by row the message of a processor's error.

    Mask and bad words are applied before a processor sees its row. Tokens that they forbid stay forbidden.
    """
    errors: dict[int, str] = {}
    changed = kernels.backend_of(logits).empty(logits.shape, torch.float32)
    changed.copy_(logits)
    vocab, rows = logits.shape[1], draw_rows(sequences)
    for index in draws.processed_rows:
        row = rows[index]
        own = logits[index].clone()
        words = np.empty(-(-vocab // 32), np.int32)
        if draws.fill_allowed(index, row, words):
            allowed = np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)
            own.masked_fill_(~torch.from_numpy(allowed), -torch.inf)
        own[draws.banned(index, row)] = -torch.inf
        had_any = _has_any(own)
        prompt, output = np.split(row.history, [row.num_prompt_tokens])
        try:
            for name in draws.draws[index].processors:
                own = _checked(NamedProcessor.named(name)(prompt.tolist(), output.tolist(), own), vocab)
                if had_any and not _has_any(own):
                    raise InvalidParamsError("it left no token that could be drawn, only -inf and NaN")
            changed[index] = own
        except Exception as error:  # a caller's code may raise anything, and only that caller's request fails
            kind = name.rpartition("#")[0]
            reason = str(error).partition("\n")[0]  # torch may list a hundred backends behind it
            errors[index] = f"the logits processor {kind} failed: {type(error).__name__}: {reason}"
    return changed, errors


def _has_any(logits: Tensor) -> bool:
    return bool((logits > -torch.inf).any())  # NaN is not


def _checked(result: object, vocab: int) -> Tensor:
    if isinstance(result, Tensor) and result.shape == (vocab,):
        return result
    got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    raise InvalidParamsError(f"it returned {got}; it must return a tensor of shape [{vocab}]")
