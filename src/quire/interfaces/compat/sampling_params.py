"""Where vLLM has its parameters, so that `from quire.sampling_params import ...` works."""

from quire.common.params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
