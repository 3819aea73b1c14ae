"""Which log-probabilities of sampled tokens are returned."""

from typing import Literal, get_args

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""`raw`: from the model's own logits; `processed`: from the logits after penalties, bias and cuts, from which tokens
are sampled. `logprobs` are normalized; `logits` are not."""
LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
