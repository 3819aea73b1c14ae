"""What a caller may ask of a request."""

from quire.params.sampling import OUTPUT_KINDS, OutputKind, SamplingParams
from quire.params.structured_outputs import StructuredOutputsParams

__all__ = ["OUTPUT_KINDS", "OutputKind", "SamplingParams", "StructuredOutputsParams"]
