"""How many drafts a step verifies: those that make it faster for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def best_lengths(
    odds: Sequence[Sequence[float]], num_tokens: float, seconds: Callable[[int], float], most: int
) -> list[int]:
    """For each sequence, the number of its drafts to verify, at most `most` in all.

    `odds` has the probabilities of each sequence's drafts, each if those before it are right; the step gives
    `num_tokens` tokens without drafts, and takes `seconds(n)` with `n` of them. A draft is worth the probability that
    it and all before it are right. They are added in the order of that, and the number is chosen with which the most
    tokens a second are expected: many numbers are looked at, since the time may grow by steps, and not all, since the
    first step with each number takes longer.
    """
    worth: list[tuple[float, int]] = []
    for index, of_sequence in enumerate(odds):
        probability = 1.0
        for of_draft in of_sequence:
            probability *= of_draft
            worth.append((-probability, index))
    worth.sort()
    best, best_rate, expected = 0, num_tokens / seconds(0), num_tokens
    for count, (negative, _) in enumerate(worth[:most], start=1):
        expected -= negative
        if count % _spacing(count):
            continue
        rate = expected / seconds(count)
        if rate > best_rate:
            best, best_rate = count, rate
    lengths = [0] * len(odds)
    for _, index in worth[:best]:
        lengths[index] += 1
    return lengths


def _spacing(count: int) -> int:
    """The distance between numbers of drafts that are chosen: of 4 to 7 every second one, of 8 to 15 every fourth."""
    return 1 << max(0, count.bit_length() - 2)


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
