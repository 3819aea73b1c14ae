"""Which log-probabilities are told of drawn tokens."""

from typing import Literal, get_args

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""of the model's own logits, or of what a token was drawn from; normalized, or the logits themselves"""
LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
