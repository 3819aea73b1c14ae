"""Parameters of a request."""

from quire.common.params.beam_search import BeamSearchParams
from quire.common.params.logprobs_mode import LOGPROBS_MODES, LogprobsMode
from quire.common.params.pooling import POOLING_TASKS, PoolerInfo, PoolingParams, PoolingTask
from quire.common.params.sampling import OUTPUT_KINDS, OutputKind, RequestOutputKind, SamplingParams
from quire.common.params.structured_outputs import StructuredOutputsParams

__all__ = [
    "LOGPROBS_MODES", "OUTPUT_KINDS", "POOLING_TASKS", "BeamSearchParams", "LogprobsMode", "OutputKind",
    "PoolerInfo", "PoolingParams", "PoolingTask", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams",
]  # fmt: skip
