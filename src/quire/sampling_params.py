"""Where vLLM has its parameters, so that `from quire.sampling_params import ...` works."""

from enum import StrEnum

from quire.common.params import BeamSearchParams, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


class RequestOutputKind(StrEnum):
    """Values of `SamplingParams.output_kind`, under vLLM's names."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"
