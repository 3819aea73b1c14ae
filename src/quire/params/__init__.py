"""What a caller may ask of a request."""

from quire.params.sampling import OUTPUT_KINDS, OutputKind, SamplingParams

__all__ = ["OUTPUT_KINDS", "OutputKind", "SamplingParams"]
