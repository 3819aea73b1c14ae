"""ServedModel: everything about a loaded model that handlers need."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.common.lora import KnownAdapter
from quire.server.api.tools.formats import ReasoningFormat, ToolFormat, choose_reasoning_format, choose_tool_format
from quire.server.config import ServerArgs
from quire.text.chat_template.template import compile_chat_template

if TYPE_CHECKING:
    from quire.interfaces.async_llm.async_llm import AsyncLLM


@dataclass(kw_only=True)
class ServedModel:
    """A model with its engine and the formats of its output. It stays the same while the model sleeps and wakes up."""

    llm: AsyncLLM
    args: ServerArgs
    adapter: KnownAdapter | None = None
    """The LoRA adapter that a request has named, in the request's own copy of this object; None: the model alone."""
    tool_format: ToolFormat | None = field(init=False)
    """Format of the model's tool calls. None: its output is not searched for calls."""
    reasoning_format: ReasoningFormat | None = field(init=False)
    """Tags around the model's reasoning. None: it marks none."""

    def __post_init__(self) -> None:
        if (text := self.args.chat_template_text()) is not None:
            compile_chat_template(text)  # an invalid one stops the server
            self.llm.tokenizer.chat_templates = {"default": text}
        templates = self.llm.tokenizer.chat_templates
        template = templates.get("tool_use") or templates.get("default")
        self.tool_format = choose_tool_format(self.args.tool_parser, template)
        self.reasoning_format = choose_reasoning_format(self.args.reasoning_parser, template)

    def with_adapter(self, adapter: KnownAdapter) -> ServedModel:
        """The same model for a request that uses the adapter."""
        other = copy(self)
        other.adapter = adapter
        return other
