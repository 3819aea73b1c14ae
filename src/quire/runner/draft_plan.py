"""What the memory plan has to know of the model or head that drafts."""

from quire.common.errors import ConfigError, TokenizerError
from quire.config.args import EngineConfig
from quire.config.checkpoint.draft_heads import HeadConfig
from quire.config.kv_cache import DTYPE_BYTES
from quire.text.tokenizer.tokenizer import Tokenizer


def check_same_tokens(config: EngineConfig) -> None:
    """Raises ConfigError unless the draft model, if there is one, has the model's tokens under the same ids."""
    if (draft := config.draft) is None or draft.head is not None:
        return
    ours = Tokenizer.from_path(config.model.tokenizer_path).vocabulary
    try:
        theirs = Tokenizer.from_path(draft.tokenizer_path).vocabulary
    except TokenizerError as error:
        raise ConfigError(f"speculative_config: {draft.drafter}: {error}") from error
    if theirs != ours:
        raise ConfigError(
            f"speculative_config: {draft.drafter} has other tokens than the model; choose one that was trained with "
            "the same tokenizer"
        )


def state_bytes(config: EngineConfig, head: HeadConfig | None) -> int:
    """The hidden states of a step: as the model keeps them for a head, and as the head reads them, side by side and
    then as one beside the embeddings."""
    if head is None:
        return 0
    num_rows = config.scheduler.max_num_batched_tokens * (3 * len(head.places) + 2)
    return num_rows * head.state_width * DTYPE_BYTES[config.model.dtype]
