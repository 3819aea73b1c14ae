"""Tool calls and reasoning: checked in requests, forced by grammars, and found in outputs as they come.

A request with tools goes through here so: `check_tools` refuses wrong ones; `tool_choice_structure` gives the grammar
of calls that must be made, and `forced_tools` how to read them; with `tool_choice="none"` the template is shown no
tools. Each sample's text then goes through a parser of its own, from `make_parser`.
"""

from quire.server.api.tools.choice import check_tools, forced_tools, tool_choice_structure
from quire.server.api.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    choose_reasoning_format,
    choose_tool_format,
    shows_special_tokens,
)
from quire.server.api.tools.output_parser import ForcedTools, OutputParser, make_parser, new_call_id
from quire.server.api.tools.parsed import Parsed, ParsedContent, ParsedReasoning, ParsedToolCall

__all__ = [
    "REASONING_FORMATS", "TOOL_FORMATS", "ForcedTools", "OutputParser", "Parsed", "ParsedContent", "ParsedReasoning",
    "ParsedToolCall", "ReasoningFormat", "ToolFormat", "check_tools", "choose_reasoning_format", "choose_tool_format",
    "forced_tools", "make_parser", "new_call_id", "shows_special_tokens", "tool_choice_structure",
]  # fmt: skip
