"""Which parts of an output's text come from accepted drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer.token_decoder import TextStream


class DraftedText:
    """Divides the text of one output, as it grows, where accepted drafts begin and end.

    Only who wants to see drafts pays for it: the tokens are turned into text once more.
    """

    def __init__(self, stream: TextStream) -> None:
        """`stream` turns the output's tokens into text."""
        self._stream = stream
        self._is_drafted: list[bool] = []  # of each character that has not been divided yet

    def divide(self, text: str, token_ids: Sequence[int], accepted_drafts: Collection[int]) -> list[tuple[str, bool]]:
        """The parts of the text that follows, each with whether it comes from drafts. The tokens are those since the
        last call, and may be ahead of the text; of them, those at the places `accepted_drafts` were drafts."""
        drafts = set(accepted_drafts)
        for place, token_id in enumerate(token_ids):
            self._is_drafted += [place in drafts] * len(self._stream.push(token_id))
        flags, self._is_drafted = self._is_drafted[: len(text)], self._is_drafted[len(text) :]
        flags += [False] * (len(text) - len(flags))  # a character that will never be complete
        runs = groupby(zip(text, flags, strict=True), key=itemgetter(1))
        return [("".join([char for char, _ in run]), drafted) for drafted, run in runs]
