"""Running the callers' own logits processors."""

import numpy as np
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import ScheduledSequence
from quire.common.errors import InvalidParamsError
from quire.runner.sampling.draw_tensors import DrawTensors, past_of


def run_processors(
    logits: Tensor, draws: DrawTensors, owners: list[ScheduledSequence]
) -> tuple[Tensor, dict[int, str]]:
    """logits [num_rows, vocab], `owners` the sequence of each row -> a copy with the rows changed that have processors,
    and by row what a processor raised or did wrong.

    A processor sees its row as mask and bad words leave it. What it allows again stays forbidden.
    """
    errors: dict[int, str] = {}
    changed = kernels.backend_of(logits).empty(logits.shape, torch.float32)
    changed.copy_(logits)
    vocab = logits.shape[1]
    for row in draws.processed_rows:
        owner = owners[row]
        own = logits[row].clone()
        words = np.empty(-(-vocab // 32), np.int32)
        if draws.fill_allowed(row, owner, words):
            allowed = np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)
            own.masked_fill_(~torch.from_numpy(allowed), -torch.inf)
        own[draws.banned(row, owner)] = -torch.inf
        had_any = _has_any(own)
        output_token_ids = past_of(owner)[owner.num_prompt_tokens :].tolist()
        try:
            for processor in draws.draws[row].processors:
                own = _checked(processor(list(output_token_ids), own), vocab)
                if had_any and not _has_any(own):
                    raise InvalidParamsError("it left no token that could be drawn, only -inf and NaN")
            changed[row] = own
        except Exception as error:  # whatever a caller's code raises is that request's alone
            name = getattr(processor, "__qualname__", None) or type(processor).__qualname__
            errors[row] = f"the logits processor {name} failed: {type(error).__name__}: {error}"
    return changed, errors


def _has_any(logits: Tensor) -> bool:
    return bool((logits > -torch.inf).any())  # NaN is not


def _checked(result: object, vocab: int) -> Tensor:
    if isinstance(result, Tensor) and result.shape == (vocab,):
        return result
    got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    raise InvalidParamsError(f"it returned {got}; it must return a tensor of shape [{vocab}]")
