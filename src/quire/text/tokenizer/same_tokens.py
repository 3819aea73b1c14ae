"""Whether a draft model has the tokens of the model that it drafts for."""

from quire.common.errors import ConfigError, TokenizerError
from quire.config.model import ModelConfig
from quire.text.tokenizer.tokenizer import Tokenizer


def check_same_tokens(model: ModelConfig, draft: ModelConfig | None) -> None:
    """Raises ConfigError unless the draft model, if there is one, has the model's tokens under the same ids."""
    if draft is None or draft.head is not None:
        return
    ours = Tokenizer.from_path(model.tokenizer_path).vocabulary
    try:
        theirs = Tokenizer.from_path(draft.tokenizer_path).vocabulary
    except TokenizerError as error:
        raise ConfigError(f"speculative_config: {draft.drafter}: {error}") from error
    if theirs != ours:
        raise ConfigError(
            f"speculative_config: {draft.drafter} has other tokens than the model; choose one that was trained with "
            "the same tokenizer"
        )
