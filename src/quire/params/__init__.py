"""What a caller may ask of a request."""

from quire.params.beam_search import BeamSearchParams
from quire.params.logprobs_mode import LOGPROBS_MODES, LogprobsMode
from quire.params.sampling import OUTPUT_KINDS, OutputKind, SamplingParams
from quire.params.structured_outputs import StructuredOutputsParams

__all__ = [
    "LOGPROBS_MODES",
    "OUTPUT_KINDS",
    "BeamSearchParams",
    "LogprobsMode",
    "OutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
