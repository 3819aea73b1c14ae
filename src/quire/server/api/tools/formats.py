"""Formats in which models write tool calls and reasoning, as tables."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from quire.common.arguments.vllm_arguments import own_format
from quire.common.errors import ConfigError
from quire.server.api.tools.call_styles import CallStyle, JsonCalls, MistralCalls, NamedCalls, Schemas, Written
from quire.server.api.tools.channels import CHANNEL, CONSTRAIN, FUNCTIONS, MESSAGE, START
from quire.server.api.tools.python_calls import PythonCalls
from quire.server.api.tools.tagged_calls import TaggedCalls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of tool calls of a family of models."""

    name: str
    tags: tuple[str, ...]
    """Each precedes calls. A grammar writes the first."""
    style: CallStyle
    signs: tuple[str, ...] = ()
    """The chat templates of models that write this format have all of these, or the first tag if there are none."""
    begins_bare: bool = False
    """Whether a call at the beginning of the output needs no tag."""
    has_channels: bool = False
    """Whether calls are messages of the harmony format."""
    excludes_content: bool = False
    """Whether an output that does not begin with a call is content, whatever it contains."""

    def written(self, schemas: Schemas, parallel: bool) -> Written:
        """Calls of these functions as a grammar writes them at the beginning of an output."""
        return self.style.written("" if self.begins_bare else self.tags[0], schemas, parallel)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around a model's reasoning at the beginning of its output."""

    starts: tuple[str, ...] = ("<think>",)
    """All forms of the first tag, the usual one first."""
    ends: tuple[str, ...] = ("</think>",)
    answer: tuple[str, ...] = ()
    """The two tags that may be around the answer, too."""
    has_channels: bool = False
    """Whether reasoning is a message of the harmony format."""
    is_open: bool = False
    """Whether the prompt ends with the start tag."""
    in_answer: bool = False
    """Whether the prompt ends with the first tag of the answer."""
    header: str = ""
    """Where the prompt ends within a message: the message's header."""

    @property
    def signs(self) -> tuple[str, ...]:
        """The chat templates of models that write this format have all of these."""
        return self.starts if self.has_channels else (self.ends[0], *self.answer)

    def after(self, prompt: str) -> ReasoningFormat:
        """Return the format of an answer to `prompt`, of which only the end matters."""
        end = prompt.rstrip()
        if self.has_channels:
            header, message, _ = prompt.rpartition(START)[2].partition(MESSAGE)
            return replace(self, header=header + message if message else "")
        return replace(self, is_open=end.endswith(self.starts), in_answer=end.endswith(self.answer[:1]))


def _xml_calls(tag: str) -> TaggedCalls:
    """Calls between `tag` and its end, as Qwen3-Coder writes them and others with another tag."""
    end = f"</function>\n{tag.replace('<', '</')}"
    return TaggedCalls(
        before_name="\n<function=", after_name=">\n", before_key="<parameter=", after_key=">\n",
        after_value="\n</parameter>\n", end=end,
    )  # fmt: skip


def _cohere_calls(end: str) -> JsonCalls:
    """An array with Cohere's keys."""
    return JsonCalls(end=end, space="\n", name_key="tool_name", arguments_key="parameters")


def _deepseek(words: str) -> str:
    """One of DeepSeek's marks, which have wide bars and low blocks instead of spaces."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_DSML = _deepseek("DSML")[1:-1]


def _dsml_calls(around: str) -> ToolFormat:
    """Calls of DeepSeek since V3.2, within these tags."""
    tags = f"<{_DSML}{around}>", f'<{_DSML}invoke name="'
    return ToolFormat(
        "deepseek_v32" if around == "function_calls" else "deepseek_v4", tags, TaggedCalls(
            before_name=f"\n{tags[1]}", after_name='">\n', before_key=f'<{_DSML}parameter name="',
            after_key='" string="{}">', after_value=f"</{_DSML}parameter>\n",
            end=f"</{_DSML}invoke>\n</{_DSML}{around}>", states_strings=True,
        )
    )  # fmt: skip


_QWEN = "<tool_call>", "<function="
_COMMAND_R = "Action: ```json", "Action:```json"
_MINIMAX = "<minimax:tool_call>", '<invoke name="'
_KIMI = "<|tool_calls_section_begin|>"
_DEEPSEEK = _deepseek("tool calls begin"), _deepseek("tool calls end")
_DEEPSEEK_CALL = _deepseek("tool call begin"), _deepseek("tool sep"), _deepseek("tool call end")
_TOOL_FORMATS = (
    ToolFormat(
        "gpt_oss", (CHANNEL,), NamedCalls(
            before_name=f"{CHANNEL}commentary to={FUNCTIONS}", after_name=f" {CONSTRAIN}json{MESSAGE}", separator=None
        ), signs=(CHANNEL, MESSAGE, FUNCTIONS), begins_bare=True, has_channels=True,
    ),
    ToolFormat(
        "deepseek_v3", _DEEPSEEK[:1], NamedCalls(
            before_name=f"{_DEEPSEEK_CALL[0]}function{_DEEPSEEK_CALL[1]}", after_name="\n```json\n",
            after_call=f"\n```{_DEEPSEEK_CALL[2]}", end=_DEEPSEEK[1], separator="\n",
        ), signs=(_DEEPSEEK[0], "```json"),
    ),
    _dsml_calls("function_calls"),
    _dsml_calls("tool_calls"),
    ToolFormat("deepseek_v31", _DEEPSEEK[:1], NamedCalls(*_DEEPSEEK_CALL, end=_DEEPSEEK[1])),
    ToolFormat("seed_oss", ("<seed:tool_call>", "<function="), _xml_calls("<seed:tool_call>")),
    ToolFormat(
        "glm45", ("<tool_call>",), TaggedCalls(
            before_name="", after_name="\n", before_key="<arg_key>", after_key="</arg_key>\n<arg_value>",
            after_value="</arg_value>\n", end="</tool_call>",
        ), signs=("<tool_call>", "<arg_key>"),
    ),
    ToolFormat(
        "minimax_m2", _MINIMAX, TaggedCalls(
            before_name=f"\n{_MINIMAX[1]}", after_name='">\n', before_key='<parameter name="', after_key='">',
            after_value="</parameter>\n", end="</invoke>\n</minimax:tool_call>",
        )
    ),
    ToolFormat(
        "kimi_k2", (_KIMI,), NamedCalls(
            before_name="<|tool_call_begin|>functions.", after_name="<|tool_call_argument_begin|>", index=":0",
            after_call="<|tool_call_end|>", end="<|tool_calls_section_end|>",
        )
    ),
    ToolFormat(
        "internlm", ("<|action_start|><|plugin|>",),
        JsonCalls(end="<|action_end|>", separator="\n", arguments_key="parameters"),
    ),
    ToolFormat("qwen3_coder", _QWEN, _xml_calls(_QWEN[0]), signs=_QWEN),
    ToolFormat("hermes", ("<tool_call>",), JsonCalls(end="</tool_call>", space="\n", separator="\n")),
    ToolFormat("mistral_v11", ("[TOOL_CALLS]",), MistralCalls(is_named=True), signs=("[TOOL_CALLS]", "[ARGS]")),
    ToolFormat("mistral", ("[TOOL_CALLS]",), MistralCalls(is_named=False)),
    ToolFormat("cohere_command3", ("<|START_ACTION|>",), _cohere_calls("<|END_ACTION|>")),
    ToolFormat("cohere_command_r", _COMMAND_R, _cohere_calls("```"), signs=(_COMMAND_R[0], "tool_name")),
    ToolFormat(
        "apertus", ("<|tools_prefix|>[",), NamedCalls(
            before_name='{"', after_name='": ', after_call="}", end="]<|tools_suffix|>", separator=", "
        ), signs=("<|tools_prefix|>",),
    ),
    ToolFormat(
        "olmo3", ("<function_calls>",), PythonCalls("", "\n", "</function_calls>"),
        signs=("<functions>", "<function_calls>"),
    ),
    ToolFormat("hunyuan_a13b", ("<tool_calls>",), JsonCalls(end="</tool_calls>")),
    ToolFormat(
        "phi4_mini_json", ("<|tool_call|>", "functools"), JsonCalls(end="<|/tool_call|>"), signs=("<|/tool|>",)
    ),
    ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), JsonCalls()),
    ToolFormat("granite-20b-fc", ("<function_call>",), JsonCalls(separator="\n")),
    ToolFormat(
        "llama3_json", ("<|python_tag|>",), JsonCalls(separator="; ", arguments_key="parameters"), begins_bare=True
    ),
    ToolFormat("pythonic", ("<|python_start|>",), PythonCalls("[", ", ", "]", "<|python_end|>"), begins_bare=True),
)  # fmt: skip
TOOL_FORMATS = {tool_format.name: tool_format for tool_format in _TOOL_FORMATS}
"""By name, in the order in which a chat template is compared with their signs."""
REASONING_FORMATS = {
    "gpt_oss": ReasoningFormat((f"{CHANNEL}analysis{MESSAGE}",), ("<|end|>",), has_channels=True),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "cohere_command4": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), answer=("<|START_TEXT|>", "<|END_TEXT|>")
    ),
    "cohere_command3": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "ernie45": ReasoningFormat(answer=("<response>", "</response>")),
    "hunyuan_a13b": ReasoningFormat(answer=("<answer>", "</answer>")),
    "think": ReasoningFormat(),
}  # fmt: skip
"""By name, in the order in which a chat template is compared with their signs."""


def choose_tool_format(choice: str, chat_template: str | None) -> ToolFormat | None:
    """The format of that name; None for `none`; for `auto` the one whose tags the template has. Raises ConfigError."""
    choice = own_format("tool_parser", choice)
    if choice == "auto":
        return _tool_format_of(chat_template or "")
    if choice != "none" and choice not in TOOL_FORMATS:
        raise ConfigError(f"tool_parser={choice!r}: must be auto, none, {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS.get(choice)


def _tool_format_of(template: str) -> ToolFormat | None:
    signs = {known: known.signs or known.tags[:1] for known in _TOOL_FORMATS}
    signed = next((known for known in signs if all(sign in template for sign in signs[known])), None)
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return TOOL_FORMATS["llama3_json"] if signed is None and is_llama else signed


def choose_reasoning_format(choice: str, chat_template: str | None) -> ReasoningFormat | None:
    """Return the format as `choose_tool_format` does. Tags of another format are written `START...END`."""
    choice = own_format("reasoning_parser", choice)
    if choice == "auto":
        template = chat_template or ""
        known = REASONING_FORMATS.values()
        return next((one for one in known if all(sign in template for sign in one.signs)), None)
    if choice == "none" or choice in REASONING_FORMATS:
        return REASONING_FORMATS.get(choice)
    start, dots, end = choice.partition("...")
    if not dots:
        raise ConfigError(
            f"reasoning_parser={choice!r}: must be auto, none, {', '.join(REASONING_FORMATS)} or START...END"
        )
    if not start.strip() or not end.strip() or start == end:
        raise ConfigError(f"the reasoning tags {start!r} and {end!r} must be different and not blank")
    return ReasoningFormat((start,), (end,))


def shows_special_tokens(
    reasoning: ReasoningFormat | None, tools: ToolFormat | None, special_token_texts: Collection[str]
) -> bool:
    """Whether a tag contains a special token, so that special tokens must stay in the text that is parsed."""
    tags = [*tools.tags] if tools else []
    tags += [*reasoning.starts, *reasoning.ends, *reasoning.answer] if reasoning else []
    return any(text and text in tag for text in special_token_texts for tag in tags)
