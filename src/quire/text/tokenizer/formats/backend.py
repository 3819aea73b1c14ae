"""What the formats have in common: the tokenizer that a format gives, and the limits of what is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers

from quire.common.errors import TokenizerError

MAX_FILE_BYTES = 64 * 1024**2
"""Most bytes of a vocabulary's file. The largest known ones have 20 MB."""
_MAX_TOKEN_LEN = 1024
"""Most characters of a token; the largest known ones are runs of 256 spaces."""


@dataclass(frozen=True, slots=True)
class Built:
    """A tokenizer made of a vocabulary, and what its format says beside it. The checkpoint's JSON files go first."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Maps roles to tokens, such as `eos_token` to `</s>`."""
    adds_bos: bool = False
    """Whether a text begins with the BOS token unless `add_bos_token` says otherwise."""
    truncation_side: str = "right"
    """The end at which texts are cut, unless `truncation_side` says otherwise."""


def merges_by_rank(ids: Mapping[str, int], ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a third, in the order in which BPE applies them.

    SentencePiece and tiktoken join the two neighbours whose token has the smallest rank, whatever these are; merges
    that name both neighbours give the same result. `ids` orders the pairs that make the same token. Only the tokens of
    `ranks` are joined, and made. Raises TokenizerError for a token that is too long.
    """
    merges: list[tuple[float, tuple[str, str]]] = []
    for token, rank in ranks.items():
        if len(token) > _MAX_TOKEN_LEN:
            raise TokenizerError(
                f"the token {token[:40]!r} and so on has {len(token)} characters: at most {_MAX_TOKEN_LEN} are allowed"
            )
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        found = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        found.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(rank, pair) for pair in found]
    merges.sort(key=lambda ranked: ranked[0])
    return [pair for _, pair in merges]
