"""The prompts of a request's body."""

from quire.common.errors import InvalidPromptError
from quire.engine.requests.input_processor import Prompt
from quire.server.api.shared.fields import Prompts


def listed_prompts(prompt: Prompts) -> list[Prompt]:
    """The prompts as a list, also if there is only one. Raises InvalidPromptError."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    listed: list[Prompt] = [item for item in prompt if not isinstance(item, int)]
    if not listed or len(listed) < len(prompt):
        raise InvalidPromptError(
            "the prompt must be a string, a list of token ids, or a list of either, and must not be empty"
        )
    return listed
