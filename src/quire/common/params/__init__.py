"""Parameters of a request."""

from quire.common.params.beam_search import BeamSearchParams
from quire.common.params.logprobs_mode import LOGPROBS_MODES, LogprobsMode
from quire.common.params.sampling import OUTPUT_KINDS, OutputKind, RequestOutputKind, SamplingParams
from quire.common.params.structured_outputs import StructuredOutputsParams

__all__ = [
    "LOGPROBS_MODES", "OUTPUT_KINDS", "BeamSearchParams", "LogprobsMode", "OutputKind",
    "RequestOutputKind", "SamplingParams", "StructuredOutputsParams",
]  # fmt: skip
