"""What requests take from a checkpoint: its tokenizer, and the sampling parameters that it recommends."""

from collections.abc import Mapping
from typing import Any

from quire.common.errors import CheckpointError, InvalidParamsError, TokenizerError
from quire.common.log import logger
from quire.common.params import SamplingParams
from quire.config.model import ModelConfig
from quire.text.tokenizer.tokenizer import Tokenizer


def recommended_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that a generation_config.json recommends, with SamplingParams' defaults for the others.
    Raises CheckpointError for invalid values."""
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    names["max_new_tokens"] = "max_tokens"
    given = {name: value for key, name in names.items() if (value := generation_config.get(key)) is not None}
    if generation_config.get("do_sample") is False:
        given = {name: given[name] for name in ("repetition_penalty", "max_tokens") if name in given}
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except InvalidParamsError as error:  # not the caller's params
        raise CheckpointError(
            f"the checkpoint's generation_config.json: {error}; correct it, or do without: generation_config='none'"
        ) from error


def tokenizer_of(model: ModelConfig) -> Tokenizer:
    """Read the tokenizer of a model, and check the sampling parameters that its files recommend.

    Raises TokenizerError if the tokenizer is missing or damaged, or if the model's own files hold one that was trained
    with more tokens than the model has; and CheckpointError for a malformed GGUF file or parameters out of range.
    Tokens that were added later, and those of another tokenizer that the caller has named, may have larger ids. The log
    says so, and texts with these tokens are refused.
    """
    recommended_params(model.generation_config)
    tokenizer = Tokenizer.from_path(model.tokenizer_path)
    known, found = model.vocab_size, tokenizer.vocab_size
    if model.tokenizer_path == model.path and found - tokenizer.num_added_tokens > known:
        raise TokenizerError(
            f"{tokenizer.source} holds a tokenizer of {found} tokens and a model whose 'vocab_size' is {known}: they "
            "do not belong together; give the folder of the model's tokenizer with the argument `tokenizer`"
        )
    if found > known:
        message = "%s has %d tokens, and the model %d: texts with the other tokens are refused"
        logger.warning(message, tokenizer.source, found, known)
    return tokenizer
