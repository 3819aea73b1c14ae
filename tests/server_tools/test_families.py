"""The formats of families whose calls are not JSON objects, and whose answers have tags of their own."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.api.chat.events import ContentDelta, ToolCallDelta
from quire.server.api.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    choose_reasoning_format,
    choose_tool_format,
    shows_special_tokens,
)
from quire.server.api.tools.output_parser import OutputParser
from quire.server.config import REASONING_PARSERS, TOOL_PARSERS

from .folding import cut, parse

QWEN, GLM, SEED = (TOOL_FORMATS[name] for name in ("qwen3_coder", "glm45", "seed_oss"))
SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "integer"},
            "flag": {"type": "boolean"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "size": {"enum": ["1", "2"]},
            "level": {"enum": ["1", 2]},
            "only": {"const": "1"},
            "maybe": {"type": ["string", "null"]},
            "list": {"type": "array"},
            "free": {},
            "odd": True,
        },
    }
}


def qwen(*arguments, name="f", tag="tool_call"):
    """A call as Qwen3-Coder's template writes it."""
    made = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<{tag}>\n<function={name}>\n{made}</function>\n</{tag}>"


def glm(*arguments, name="f"):
    """A call as GLM's template writes it."""
    made = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>{name}\n{made}</tool_call>"


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", "\n a\n\n", "\n a\n\n"),
        ("text", 'say "é"\\\n<b>', 'say "é"\\\n<b>'),
        ("text", "", ""),
        ("number", "12", 12),
        ("number", " 12 ", 12),
        ("number", "twelve", "twelve"),
        ("number", "012", "012"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "1", "1"),
        ("either", "12", 12),
        ("either", "12a", "12a"),
        ("either", "[1]", "[1]"),
        ("size", "1", "1"),
        ("level", "2", 2),
        ("only", "1", "1"),
        ("maybe", "None", None),
        ("maybe", "12", "12"),
        ("list", '[1, {"a": "b"}]', [1, {"a": "b"}]),
        ("list", "[1, ", "[1, "),
        ("list", "[" * 200 + "]" * 200, "[" * 200 + "]" * 200),
        ("free", "12", 12),
        ("free", "NaN", "NaN"),
        ("free", "1, 2", "1, 2"),
        ("free", '"a"', "a"),
        ("odd", "null", None),
        ("unknown", "a b", "a b"),
    ],
)
@pytest.mark.parametrize(("tools", "write"), [(QWEN, qwen), (GLM, glm)])
def test_a_value_is_json_where_the_schema_allows_it(tools, write, key, written, value):
    text = write((key, written), ("number", 1))
    for pieces in ([text], list(text)):
        answer = parse(pieces, tools=tools, schemas=SCHEMAS)
        ((name, arguments),) = answer.calls
        assert (answer.content, name) == ("", "f")
        assert json.loads(arguments) == {key: value, "number": 1} | ({"number": 1} if key == "number" else {})


@given(
    st.dictionaries(st.from_regex(r"[a-zé_ -]*[a-zé_]", fullmatch=True).map(str.strip), st.text(), max_size=3),
    st.lists(st.integers(0, 10_000), max_size=8),
)
def test_texts_arrive_unchanged(arguments, where):
    schemas = {"f": {"properties": {key: {"type": "string"} for key in arguments}}}
    for tools, text in (
        (QWEN, "Hm.\n" + qwen(*arguments.items())),
        (SEED, "Hm.\n" + qwen(*arguments.items(), tag="seed:tool_call")),
        (GLM, "Hm.\n" + glm(*arguments.items())),
    ):
        answer = parse(cut(text, where), tools=tools, schemas=schemas)
        assert [(name, json.loads(found)) for name, found in answer.calls] == [("f", arguments)]
        assert answer.content == "Hm."


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        (QWEN, qwen() + "\n" + qwen(name="g"), "", [("f", "{}"), ("g", "{}")]),
        (QWEN, "Hm. <function=f>\n<parameter=a>1</parameter></function>", "Hm.", [("f", '{"a": 1}')]),
        (QWEN, "<tool_call><function=f></function>Done.", "Done.", [("f", "{}")]),
        (GLM, "<tool_call>f</tool_call>", "", [("f", "{}")]),
        (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [("f", '{"a": 1}')]),
        # what breaks off is closed where the output goes on
        (QWEN, "<function=f><parameter=a>1</parameter>\nDone.", "\nDone.", [("f", '{"a": 1}')]),
        (QWEN, "<function=f><parameter=a>1</parameter><parameter=b", "<parameter=b", [("f", '{"a": 1')]),
        (QWEN, "<function=f><parameter=a>1</parameter><parameter=b c", "<parameter=b c", [("f", '{"a": 1')]),
        (QWEN, "<function=f><parameter=a>1</parameter><parameter=>", "<parameter=>", [("f", '{"a": 1}')]),
        (QWEN, "<function=f><parameter=a>1</parameter>", "", [("f", '{"a": 1')]),
        (QWEN, "<function=f><parameter=text>x", "", [("f", '{"text": "x')]),
        (QWEN, "<function=f><parameter=list>[1", "", [("f", '{"list": "[1"')]),
        (QWEN, "<function=f><parameter=list>", "", [("f", '{"list": ')]),
        *((QWEN, text, text, []) for text in (
            "<tool_call> <function=", "<function=a b>", "<function=f", "<function=f> then", "<tool_call>{}",
            "<function=f><parameter=a",
        )),
        *((GLM, text, text, []) for text in (
            "the tag <tool_call> stands for a call", "<tool_call>f<arg_key>a</arg_key>1", "<tool_call></tool_call>",
        )),
    ],
)  # fmt: skip
def test_tagged_calls_and_what_is_none(tools, text, content, calls):
    for pieces in ([text], list(text)):
        answer = parse(pieces, tools=tools, schemas=SCHEMAS)
        assert (answer.content, answer.calls) == (content, calls)


def test_a_text_is_streamed_and_another_value_comes_whole():
    parser = OutputParser(tools=QWEN, schemas=SCHEMAS, new_id=lambda: "call_0")
    assert parser.feed("Hi <tool_call>\n<function=f>\n<parameter=text>\none") == [
        ContentDelta(0, "Hi"),
        ToolCallDelta(0, 0, "call_0", "f", '{"text": "one'),
    ]
    assert parser.feed(" two\n") == [ToolCallDelta(0, 0, None, None, " two")]
    assert parser.feed("</parameter>\n<parameter=list>\n[1,") == [ToolCallDelta(0, 0, None, None, '", "list": ')]
    assert parser.feed(" 2]\n</parameter>") == [ToolCallDelta(0, 0, None, None, "[1, 2]")]
    assert parser.feed("\n</function>\n</tool_call>") == [ToolCallDelta(0, 0, None, None, "}")]
    assert parser.finish() == []


HARMONY = {"reasoning": REASONING_FORMATS["gpt_oss"], "tools": TOOL_FORMATS["gpt_oss"]}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|channel|>final<|message|>Yes."
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        (f"{THOUGHT}<|start|>assistant{FINAL}<|return|>", "Hm.", "Yes.", []),
        (f'{THOUGHT}<|start|>assistant{TO_F}{{"a": 1}}<|call|>', "Hm.", "", [F]),
        (f'{TO_F}{{"a": 1}}<|end|><|start|>assistant{TO_F}{{"a": 1}}<|call|>', "", "", [F, F]),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", "", [F]),
        (
            f'<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{TO_F}{{"a": 1}}',
            "",
            "Let me see.",
            [F],
        ),
        (f"<|channel|>commentary<|message|>One.<|end|><|start|>assistant{FINAL}", "", "One.\nYes.", []),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}", "Hm.\nHm.", "", []),
        (f"<|channel|>final<|message|>One. <|start|>assistant{THOUGHT}", "Hm.", "One. ", []),
        ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", "{}", "", []),
        (f'{TO_F}{{"a": 1, bad}}<|call|>', "", "bad}", [("f", '{"a": 1, ')]),
        (f'{TO_F}{{"a"', "", "", [("f", '{"a"')]),
        # text that is no message
        ("Yes, assistant. ", "", "Yes, assistant. ", []),
        (f"{TO_F}one<|call|>", "", f"{TO_F}one", []),
        ("<|channel|>final one two three<|end|>", "", "<|channel|>final one two three<|end|>", []),
        ("<|channel|>" + "final " * 9 + "<|message|>", "", "<|channel|>" + "final " * 9 + "<|message|>", []),
        (f"One.<|start|>two<|start|>assistant{FINAL}", "", "One.<|start|>twoYes.", []),
    ],
)
def test_messages_go_where_their_channel_says(text, thought, content, calls):
    for pieces in ([text], list(text)):
        answer = parse(pieces, **HARMONY)
        assert (answer.reasoning, answer.content, answer.calls) == (thought, content, calls)


def test_without_formats_of_their_own_messages_are_content():
    text = f'{THOUGHT}<|start|>assistant{TO_F}{{"a": 1}}<|call|>'
    assert parse([text], reasoning=HARMONY["reasoning"]).content == '{"a": 1}'
    assert parse([text], tools=HARMONY["tools"]).content == "Hm."


def test_a_prompt_may_end_within_a_message():
    form = REASONING_FORMATS["gpt_oss"]
    prompt = "<|start|>user<|message|>Hello<|end|><|start|>assistant"
    assert parse([FINAL], reasoning=form.after(prompt)).content == "Yes."
    after = form.after(f"{prompt}<|channel|>analysis<|message|>I th")
    answer = parse([f"ink.<|end|><|start|>assistant{FINAL}"], reasoning=after)
    assert (answer.reasoning, answer.content) == ("ink.", "Yes.")


@pytest.mark.parametrize(
    ("name", "text", "thought", "content"),
    [
        ("granite", "Here is my thought process: Hm.\nHere is my response: Yes.", "Hm.", "Yes."),
        ("granite", "Here's my thought process: Hm.\nHere's my response: Yes.", "Hm.", "Yes."),
        ("granite", "Here is my car.", "", "Here is my car."),
        ("ernie45", "<think>\nHm.\n</think>\n\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes."),
        ("ernie45", "<think>Hm.</think>\nYes. <response>", "Hm.", "Yes. <response>"),
        ("ernie45", "<response>\nYes.\n</response>\nMore.", "", "Yes.More."),
        ("ernie45", " <response", "", " <response"),
        ("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nYes <answer>.\n</answer>", "Hm.", "Yes <answer>."),
        ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\nYes.", "", "Yes."),
        ("seed_oss", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
        (
            "cohere_command3",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            "Hm.",
            "Yes.",
        ),
        ("cohere_command4", "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Hm.", "Yes."),
    ],
)
def test_answers_may_have_tags_too(name, text, thought, content):
    for pieces in ([text], list(text)):
        answer = parse(pieces, reasoning=REASONING_FORMATS[name])
        assert (answer.reasoning, answer.content) == (thought, content)


def test_calls_within_and_after_a_tagged_answer():
    call = '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>'
    given = {"reasoning": REASONING_FORMATS["hunyuan_a13b"], "tools": TOOL_FORMATS["hunyuan_a13b"]}
    answer = parse([f"<think>Hm.</think>\n<answer>\nSee:\n{call}\n</answer>\n{call}"], **given)
    assert (answer.reasoning, answer.content, answer.calls) == ("Hm.", "See:", [F, F])
    after = given["reasoning"].after("<think>\n\n</think>\n<answer>\n")
    assert parse(["Yes.\n</answer>"], reasoning=after).content == "Yes."


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<|start|>assistant to=functions. <|channel|>analysis<|message|> <|end|>", "gpt_oss", "gpt_oss"),
        ("<tool_call> <arg_key> </think>", "glm45", "think"),
        ("<seed:tool_call> <function= </seed:think>", "seed_oss", "seed_oss"),
        ("<|START_ACTION|> <|END_THINKING|> <|START_RESPONSE|> <|END_RESPONSE|>", "cohere_command3", "cohere_command3"),
        ("Action: ```json tool_name", "cohere_command_r", None),
        ("<|tool_call|> <think> </think> <response> </response>", "granite", "ernie45"),
        ("<|tool_call|> 'Here is my response:'", "granite", "granite"),
        ("<|tool|> <|/tool|> <|end|>", "phi4_mini_json", None),
        ("<tool_calls> </think> <answer> </answer>", "hunyuan_a13b", "hunyuan_a13b"),
        ("[TOOL_CALLS] [ARGS] [/THINK]", "mistral_v11", "mistral"),
        ("<|tool_calls_begin|> ```json </think>", "deepseek_v3", "think"),
        ("<|tool_calls_begin|> </think>", "deepseek_v31", "think"),
        ("<function_call>", "granite-20b-fc", None),
    ],
)
def test_templates_show_their_formats(template, tools, reasoning):
    template = template.replace("<|tool_calls_begin|>", "<\uff5ctool\u2581calls\u2581begin\uff5c>")
    assert choose_tool_format("auto", template) is TOOL_FORMATS[tools]
    assert choose_reasoning_format("auto", template) is REASONING_FORMATS.get(reasoning)


def test_options_have_the_names_of_the_formats():
    assert {*TOOL_PARSERS} == {"auto", "none", *TOOL_FORMATS}
    assert {*REASONING_PARSERS} == {"auto", "none", "START...END", *REASONING_FORMATS}


def test_special_tokens_of_these_formats_are_shown():
    assert shows_special_tokens(None, HARMONY["tools"], {"<|channel|>"})
    assert shows_special_tokens(HARMONY["reasoning"], None, {"<|end|>"})
    assert shows_special_tokens(REASONING_FORMATS["cohere_command3"], None, {"<|START_RESPONSE|>"})
