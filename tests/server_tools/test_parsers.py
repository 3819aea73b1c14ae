"""What each format takes for reasoning, content and calls."""

import re
from dataclasses import replace

import pytest

from quire.common.errors import ConfigError
from quire.server.api.chat.events import ContentDelta, ToolCallDelta
from quire.server.api.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    choose_reasoning_format,
    choose_tool_format,
    shows_special_tokens,
)
from quire.server.api.tools.output_parser import ForcedTools, OutputParser, new_call_id

from .folding import parse

HERMES, LLAMA, MISTRAL = (TOOL_FORMATS[name] for name in ("hermes", "llama3_json", "mistral"))
THINK = REASONING_FORMATS["think"]
F = ("f", '{"a": 1}')
G = ("g", "{}")


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
        (
            HERMES,
            '<tool_call>{"type": "function", "name": "f", "id": "7", "parameters": {"a": 1}}</tool_call>',
            "",
            [F],
        ),
        (HERMES, '<tool_call>{"n\\u0061me": "\\u0066", "arguments": {"a": 1}}</tool_call>', "", [F]),
        (
            HERMES,
            'Let me see.\n\n<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>\n'
            '<tool_call>{"name":"g","arguments":{}}</tool_call>\nDone. ',
            "Let me see.\nDone. ",
            [F, G],
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> ', "", [F]),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a": 1}}<tool_call>{"name":"g","arguments":{}}', "", [F, G]),
        (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [F]),
        (LLAMA, '\n<|python_tag|>{"name":"f","parameters":{"a": 1}}; {"name":"g","parameters":{}}\n', "", [F, G]),
        (LLAMA, 'Sure: <|python_tag|>{"name":"f","parameters":{"a": 1}}', "Sure:", [F]),
        (LLAMA, 'Sure: {"name":"f","parameters":{}}', 'Sure: {"name":"f","parameters":{}}', []),
        (LLAMA, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        (MISTRAL, '[TOOL_CALLS][{"name":"f","arguments":{"a": 1}}, {"name":"g","arguments":{}}]', "", [F, G]),
        (MISTRAL, 'Hm [TOOL_CALLS] [{"name":"f","arguments":{"a": 1},"id":"123456789"}]\n', "Hm", [F]),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', "", [F, G]),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', "", [F, G]),
    ],
)
def test_calls_are_found_between_the_content(tools, text, content, calls):
    answer = parse([text], tools=tools)
    assert (answer.content, answer.calls) == (content, calls)
    assert answer.ids == [f"call_{i}" for i in range(len(calls))]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (HERMES, "the tag <tool_call> stands for a call, </tool_call> ends one"),
        (HERMES, '  <tool_call> {"name": "f"} </tool_call>\n'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": []}</tool_call>'),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}, "parameters": {}, "name": "f"}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f'),
        (HERMES, '<tool_call>{"na'),
        (HERMES, "a\n<tool_call"),
        (LLAMA, " ; "),
        (LLAMA, "<|python_tag|>print(1)"),
        (MISTRAL, "[TOOL_CALLS][]"),
        (MISTRAL, "[TOOL_CALLS]{}"),
        (MISTRAL, "[TOOL_CALLS]f g"),
        (MISTRAL, "[TOOL_CALLS]f[1]"),
    ],
)
def test_text_other_than_a_call_is_content_to_the_last_character(tools, text):
    answer = parse([text], tools=tools)
    assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"a": 1, bad}', '{"a": 1, '),
        ('{"a": 01}', '{"a": '),
        ('{"a": "\\x"}', '{"a": "'),
        ('{"a": "new\nline"}', '{"a": "new'),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a" 1}', '{"a" '),
        ('{"a": 1]}', '{"a": 1'),
        ('{"a": [1}', '{"a": [1'),
        ("{1: 2}", "{"),
        ('{"a": NaN}', '{"a": '),
        ('{"a": ' + "1" * 600 + "}", '{"a": ' + "1" * 128),
        ('{"a": ' + "[" * 200 + "}", '{"a": ' + "[" * 127),
    ],
)
def test_a_call_that_breaks_keeps_its_beginning_and_the_rest_is_content(arguments, kept):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>!'
    answer = parse([text], tools=HERMES)
    assert answer.calls == [("f", kept)]
    assert answer.content.strip() == text[text.index(arguments) + len(kept) :].strip()


@pytest.mark.parametrize("end", ['{"a": tr', '{"a": "x\\', '{"a": "\\u00', '{"a": -', '{"a": 12', '{"a": [{', '{"a'])
def test_an_output_cut_off_leaves_all_of_the_arguments_begun(end):
    answer = parse([f'<tool_call>{{"name": "f", "arguments": {end}'], tools=HERMES)
    assert (answer.content, answer.calls) == ("", [("f", end)])


def test_what_follows_broken_calls_is_still_found():
    text = '<tool_call> <tool_call>{"name": <tool_call>{"name": "g", "arguments": {}}</tool_call> <tool'
    answer = parse([text], tools=HERMES)
    assert answer.calls == [G]
    assert answer.content == '<tool_call> <tool_call>{"name": <tool'


def test_arguments_come_as_they_are_written():
    parser = OutputParser(tools=HERMES, new_id=lambda: "call_0")
    assert parser.feed('Hi <tool_call>{"name": "f", "arguments": ') == [ContentDelta(0, "Hi")]
    assert parser.feed('{"city": "Pa') == [ToolCallDelta(0, 0, "call_0", "f", '{"city": "Pa')]
    assert parser.feed("ris") == [ToolCallDelta(0, 0, None, None, "ris")]
    assert parser.feed('"}') == [ToolCallDelta(0, 0, None, None, '"}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []


def test_content_waits_only_while_it_could_be_a_tag():
    parser = OutputParser(tools=HERMES)
    assert parser.feed("a <tool") == [ContentDelta(0, "a")]
    assert parser.feed("s") == [ContentDelta(0, " <tools")]


def test_calls_beyond_the_limit_are_left_out():
    text = (
        'a<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call><tool_call>{"name":"g","arguments":{}}</tool_call>b'
    )
    answer = parse([text], tools=HERMES, max_calls=1)
    assert (answer.content, answer.calls) == ("ab", [F])


@pytest.mark.parametrize(
    ("reasoning", "text", "thought", "content"),
    [
        (THINK, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (THINK, "\n<think></think>Yes. ", "", "Yes. "),
        (THINK, "<think>Hm. ", "Hm.", ""),
        (THINK, "<think>a </thin b</think>c</think>", "a </thin b", "c</think>"),
        (THINK, " Yes <think>no</think>", "", " Yes <think>no</think>"),
        (THINK, "Hm.</think>Yes.", "", "Hm.</think>Yes."),
        (THINK.after("<|im_start|>assistant\n<think>\n"), "Hm.\n</think>\nYes.", "Hm.", "Yes."),
        (THINK.after("<think>"), "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (THINK.after("<think>"), "Hm", "Hm", ""),
        (THINK.after("<think></think>"), "Yes.", "", "Yes."),
        (REASONING_FORMATS["mistral"], "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ],
)
def test_reasoning_is_separated_from_the_answer(reasoning, text, thought, content):
    answer = parse([text], reasoning=reasoning)
    assert (answer.reasoning, answer.content) == (thought, content)


def test_calls_come_after_reasoning_and_not_within():
    call = '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>'
    answer = parse([f"<think>{call}</think>\n{call}"], reasoning=THINK, tools=HERMES)
    assert (answer.reasoning, answer.content, answer.calls) == (call, "", [F])
    answer = parse(['<think></think>{"name":"f","parameters":{"a": 1}}'], reasoning=THINK, tools=LLAMA)
    assert answer.calls == [F]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("f", ' {"a": 1}', "", [F]),
        ("f", '{"a', "", [("f", '{"a')]),
        ("f", "[1]", "[1]", []),
        (None, '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}] ', "", [F, G]),
        (None, '[{"name": "f", "parameters": {"a": 1}}, {"na', "", [F]),
        (None, '[{"name": "f", "parameters": {"a": 1}', "", [F]),
        (None, '[ {"name": "f", "parameters": {"a', "", [("f", '{"a')]),
        (None, '[ {"name": "f", "parameters"', "", []),
        (None, '[{"name": "f', "", []),
        (None, '[{"name": "\\', "", []),
        (None, " ", "", []),
        (None, '[{"name" "f"', '[{"name" "f"', []),
        (None, '{"a": 1}', '{"a": 1}', []),
    ],
)
def test_forced_calls_are_the_whole_output(name, text, content, calls):
    answer = parse([text], reasoning=THINK.after("<think>"), tools=HERMES, forced=ForcedTools(name))
    assert (answer.reasoning, answer.content, answer.calls) == ("", content, calls)


def test_without_formats_all_text_is_content_at_once():
    parser = OutputParser()
    assert parser.feed(" <tool_call>\n") == [ContentDelta(0, " <tool_call>\n")]
    assert parser.feed("") == parser.finish() == []


def test_ids_are_long_and_new():
    ids = {new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in ids)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{{ call | tojson }}</tool_call>{% endif %}", "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>{{ '<|python_tag|>' }}", "llama3_json"),
        ('<|start_header_id|> Respond with {"name": ..., "parameters": ...}', "llama3_json"),
        ("<functions>{{ tools }}</functions> <function_calls></function_calls>", "olmo3"),
        ("<\uff5cDSML\uff5cfunction_calls>", "deepseek_v32"),
        ("<\uff5cDSML\uff5ctool_calls>", "deepseek_v4"),
        ("{{ '<|tools_prefix|>' }}", "apertus"),
        ("{{ '<|python_start|>' }}", "pythonic"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_decides_the_tool_format(template, name):
    chosen = choose_tool_format("auto", template)
    assert (chosen and chosen.name) == name


def test_reasoning_formats_are_chosen_by_name_template_or_tags():
    assert choose_reasoning_format("auto", "{{ content.split('</think>')[-1] }}") == THINK
    assert choose_reasoning_format("auto", "[THINK] [/THINK]") == REASONING_FORMATS["mistral"]
    assert choose_reasoning_format("auto", "plain") is choose_reasoning_format("none", "</think>") is None
    assert choose_reasoning_format("<a>...</a>", None) == ReasoningFormat(("<a>",), ("</a>",))


@pytest.mark.parametrize("choice", ["thinks", "...", "<a>...", "<a>...<a>", ""])
def test_wrong_reasoning_formats_are_refused(choice):
    with pytest.raises(ConfigError, match=r"reasoning_parser=|reasoning tags"):
        choose_reasoning_format(choice, None)


def test_wrong_tool_formats_are_refused():
    with pytest.raises(ConfigError, match=r"'hermess': must be auto, none, .*, hermes"):
        choose_tool_format("hermess", None)
    assert choose_tool_format("none", "<tool_call>") is None


def test_tags_that_are_special_tokens_must_be_shown():
    assert shows_special_tokens(None, MISTRAL, {"[TOOL_CALLS]", "</s>"})
    assert shows_special_tokens(THINK, None, {"</think>"})
    assert shows_special_tokens(None, TOOL_FORMATS["deepseek_v32"], {"\uff5cDSML\uff5c"})
    assert not shows_special_tokens(THINK, HERMES, {"[TOOL_CALLS]", ""})
    assert not shows_special_tokens(None, None, {"</s>"})


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>\n' * 2, "", [F, F]),
        (HERMES, '\n{"a": "<tool_call>{}"} ', '\n{"a": "<tool_call>{}"} ', []),
        (HERMES, "<tool_cal", "<tool_cal", []),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [F]),
        (MISTRAL, '["[TOOL_CALLS]f{}"]', '["[TOOL_CALLS]f{}"]', []),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
        (LLAMA, '{"a": "<|python_tag|>"}', '{"a": "<|python_tag|>"}', []),
    ],
)
def test_beside_a_format_only_a_call_at_the_beginning_is_one(tools, text, content, calls):
    tools = replace(tools, excludes_content=True)
    for pieces in ([text], list(text)):
        answer = parse(pieces, tools=tools)
        assert (answer.content, answer.calls) == (content, calls)
