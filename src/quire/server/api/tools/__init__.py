"""Tool calls and reasoning: checked in requests, forced by grammars, and parsed from outputs while they arrive.

For a request with tools, `check_tools` rejects invalid ones, `allowed_tools` returns those that the model may call,
`tool_choice_structure` returns the grammar of calls that it must make, and `forced_tools` says how to read them;
`calls_or_content` returns the grammar of calls that it may make instead of answering in a format; with
`tool_choice="none"` the template gets no tools. The text of each choice is then read by an `OutputParser` of its own.
"""

from quire.server.api.tools.choice import (
    allowed_tools,
    calls_or_content,
    check_tools,
    forced_tools,
    tool_choice_structure,
)
from quire.server.api.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    choose_reasoning_format,
    choose_tool_format,
    shows_special_tokens,
)
from quire.server.api.tools.json_text import arguments_of
from quire.server.api.tools.output_parser import ForcedTools, OutputParser, new_call_id
from quire.server.api.tools.parsed import Parsed
from quire.server.api.tools.schemas import argument_schemas

__all__ = [
    "REASONING_FORMATS", "TOOL_FORMATS", "ForcedTools", "OutputParser", "Parsed", "ReasoningFormat", "ToolFormat",
    "allowed_tools", "argument_schemas", "arguments_of", "calls_or_content", "check_tools", "choose_reasoning_format",
    "choose_tool_format", "forced_tools", "new_call_id", "shows_special_tokens", "tool_choice_structure",
]  # fmt: skip
