"""The sampling parameters that a checkpoint recommends."""

from collections.abc import Mapping
from typing import Any

from quire.common.errors import CheckpointError, InvalidParamsError
from quire.common.params import SamplingParams


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
