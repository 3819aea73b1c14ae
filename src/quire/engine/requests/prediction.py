"""The output that a request predicts, from which drafts are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.common.errors import InvalidParamsError, InvalidPromptError, PromptTooLongError
from quire.common.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.requests.input_processor import InputProcessor


def with_tokenized_prediction(inputs: InputProcessor, params: SamplingParams) -> SamplingParams:
    """Return the parameters with token ids for a prediction that is text, without special tokens around it. Raises
    InvalidParamsError if no output could be as long, or a token is not the model's."""
    token_ids, limit = params.prediction, inputs.model.max_model_len
    if token_ids is None:
        return params
    if isinstance(token_ids, str):
        try:
            token_ids = inputs.encode(token_ids, add_special_tokens=False)
        except (InvalidPromptError, PromptTooLongError) as error:
            raise InvalidParamsError(f"prediction: {error}") from error
    if len(token_ids) > limit:
        raise InvalidParamsError(
            f"prediction has {len(token_ids):,} tokens, and the context holds {limit:,}: shorten it"
        )
    inputs.check_ids("prediction", token_ids)
    return replace(params, prediction=token_ids)
