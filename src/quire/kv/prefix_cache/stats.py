"""What prefix lookups found, and why they did not find more. All numbers are tokens."""

from enum import Enum


class MissReason(Enum):
    """Why the tokens behind a hit had to be computed."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    OTHER_KEY = "other_key"
    """The same tokens are cached under another LoRA id."""
    NOT_COMPUTED = "not_computed"
    """Another sequence is computing them."""


class HitSource(Enum):
    """Where a block of a cached prefix was found."""

    DEVICE = "device"
    HOST = "host"
    """Spilled to the host tier, and copied back."""
    JOINED = "joined"
    """Computed by another sequence in the same step."""

    __hash__ = object.__hash__  # faster than Enum's, for each lookup counts by source


class PrefixCacheStats:
    """Counters since the engine was created. A request that is preempted and computed again is not counted again."""

    def __init__(self) -> None:
        self.num_queried_tokens = 0
        self.num_block_hit_tokens = dict.fromkeys(HitSource, 0)
        """Tokens found in whole blocks, by source."""
        self.num_tail_hit_tokens = 0
        """Tokens found in part of a block, whose slots were copied."""
        self.num_missed_tokens = dict.fromkeys(MissReason, 0)
        self.num_evicted_tokens = 0
        """Tokens whose content was evicted and is in no tier any more."""
        self.num_spilled_tokens = 0
        """Tokens that were copied to the host tier instead of being lost."""

    @property
    def num_hit_tokens(self) -> int:
        """Tokens that did not have to be computed."""
        return sum(self.num_block_hit_tokens.values()) + self.num_tail_hit_tokens

    @property
    def hit_rate(self) -> float:
        """The share of the looked-up tokens that were found."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)

    def to_dict(self) -> dict[str, int]:
        """The counters by name, for JSON and metrics."""
        return {
            "queried": self.num_queried_tokens,
            "hit": self.num_hit_tokens,
            **{f"hit_{source.value}": count for source, count in self.num_block_hit_tokens.items()},
            "hit_tail": self.num_tail_hit_tokens,
            **{f"missed_{reason.value}": count for reason, count in self.num_missed_tokens.items()},
            "evicted": self.num_evicted_tokens,
            "spilled": self.num_spilled_tokens,
        }
