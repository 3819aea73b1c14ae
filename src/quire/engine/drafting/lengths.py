"""How many drafts a step verifies: those that make it faster for each token."""

from collections.abc import Callable, Sequence
from math import log


def best_lengths(
    odds: Sequence[Sequence[float]],
    num_decodes: int,
    seconds: Callable[[int], float],
    most: int,
    num_rows: int | None = None,
) -> list[int]:
    """For each sequence, the number of its drafts to verify, at most `most` in all.

    `odds` has the probabilities of each sequence's drafts, each if those before it are right; `num_decodes` sequences,
    these among them, take part in the step, which takes `seconds(n)` with `n` drafts. What counts is the geometric mean
    of all sequences' tokens a second, so that none goes without drafts because others are easier to foresee. A draft is
    worth the share by which it raises the expected tokens of its sequence. They are added in the order of that, and the
    best number is chosen: many are looked at, since the time may grow by steps. A step that is recorded has `num_rows`
    rows without drafts, and only some numbers of rows are chosen then, since the first step with each takes longer.
    """
    worth: list[tuple[float, int]] = []
    for index, of_sequence in enumerate(odds):
        probability = expected = 1.0
        for of_draft in of_sequence:
            probability *= of_draft
            worth.append((-log(1.0 + probability / expected), index))
            expected += probability
    worth.sort()
    best, best_gain, tokens_gain, alone = 0, 0.0, 0.0, seconds(0)
    for count, (negative, _) in enumerate(worth[:most], start=1):
        tokens_gain -= negative
        if num_rows is not None and (num_rows + count) % _spacing(num_rows + count):
            continue
        gain = tokens_gain - num_decodes * log(seconds(count) / alone)
        if gain > best_gain:
            best, best_gain = count, gain
    lengths = [0] * len(odds)
    for _, index in worth[:best]:
        lengths[index] += 1
    return lengths


def _spacing(num_rows: int) -> int:
    """The distance between numbers of rows that are chosen: to 8 each one, to 16 every second, to 32 every fourth."""
    return 1 << max(0, (num_rows - 1).bit_length() - 3)


def first_lengths(given: Sequence[int], most: int) -> list[int]:
    """Of drafts of these lengths as many tokens as there are, at most `most` in all, the first sequences first."""
    lengths = list[int]()
    for length in given:
        lengths.append(min(length, most))
        most -= lengths[-1]
    return lengths


def least_odds(num_tokens: int, num_sequences: int, seconds: Callable[[int], float]) -> float:
    """The probability that a draft must have at least to make the step's `num_tokens` tokens cheaper, alone or together
    with one of each of `num_sequences`: a step that has one more row may be no longer, and the next one be."""
    alone = seconds(0)
    return max(0.0, min(num_tokens * (seconds(n) / alone - 1.0) / n for n in (1, num_sequences)))
