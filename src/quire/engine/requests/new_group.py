"""Makes the SequenceGroup of a request that InputProcessor has checked. Only the engine needs one."""

import numpy as np

from quire.engine.requests.input_processor import CheckedRequest, InputProcessor
from quire.engine.requests.sequence import Sequence, SequenceGroup
from quire.runner.sampling.named_processor import NamedProcessor


def new_group(inputs: InputProcessor, request: CheckedRequest, seq_id: int) -> SequenceGroup:
    """Return the group of a request that draws tokens, whose sequence is forked once the prompt is computed, or of one
    that pools, which ends then."""
    outputs = request.outputs
    if outputs.pooling is not None:
        seq = Sequence(seq_id, outputs.prompt_token_ids, (), request.sample, pooling=outputs.pooling)
        return SequenceGroup(outputs, seq, request.content_key, adapter=request.adapter)
    processors = tuple([NamedProcessor(processor) for processor in outputs.params.logits_processors or ()])
    draws = inputs.draws(outputs.params, tuple([named.name for named in processors]))
    seq = Sequence(seq_id, outputs.prompt_token_ids, draws, request.sample, outputs.scores)
    if request.search is not None:
        request.search.start(seq)
    group = SequenceGroup(outputs, seq, request.content_key, request.search, processors, request.adapter)
    if outputs.params.prediction:
        group.prediction = np.array(outputs.params.prediction, np.int32)
    return group


def new_scoring_group(request: CheckedRequest, seq_id: int) -> SequenceGroup:
    """Return the group of a request that draws nothing and ends when its tokens are scored. The last need not run."""
    token_ids, scores = request.outputs.prompt_token_ids[:-1], request.outputs.scores
    seq = Sequence(seq_id, token_ids, (), request.sample, scores)
    return SequenceGroup(request.outputs, seq, request.content_key, adapter=request.adapter)
