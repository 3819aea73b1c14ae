"""The latest outputs, kept apart by who may learn from them."""

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from quire.common.batch import TokenIds
from quire.engine.drafting.lookup import END

_MOST_SCOPES = 1024


class RecentOutputs:
    """The tokens of finished outputs by scope, the least recently used scopes forgotten first.

    A scope is a tenant with a content key: what is drafted for a request, and so the time that it takes, depends on no
    other scope. Memory is at most `max_tokens` numbers of 4 bytes and _MOST_SCOPES names, and a scope has at most a
    quarter of the numbers.
    """

    def __init__(self, max_tokens: int = 2**16) -> None:
        self._max_tokens = max_tokens
        self._texts: OrderedDict[Hashable, TokenIds] = OrderedDict()
        self._num_tokens = 0

    def of(self, scope: Hashable) -> TokenIds | None:
        """[num_tokens]: the scope's outputs one after another, END between them, the latest last; None for none."""
        if scope in self._texts:
            self._texts.move_to_end(scope)
        return self._texts.get(scope)

    def add(self, scope: Hashable, token_ids: TokenIds) -> None:
        """Remember an output of this scope."""
        most = self._max_tokens // 4
        known = self._texts.pop(scope, np.empty(0, np.int32))
        self._num_tokens -= len(known)
        text = np.concatenate([known, np.array([END], np.int32), token_ids])[-most:].copy()
        self._texts[scope] = text
        self._num_tokens += len(text)
        while self._num_tokens > self._max_tokens or len(self._texts) > _MOST_SCOPES:
            _, forgotten = self._texts.popitem(last=False)
            self._num_tokens -= len(forgotten)
