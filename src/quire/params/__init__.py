"""What a caller may ask of a request."""

from quire.params.beam_search import BeamSearchParams
from quire.params.sampling import OUTPUT_KINDS, OutputKind, SamplingParams

__all__ = ["OUTPUT_KINDS", "BeamSearchParams", "OutputKind", "SamplingParams"]
