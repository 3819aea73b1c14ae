"""However a text is cut, the answer is the same; nothing is lost; hostile text costs no more than its length."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.api.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.server.api.tools.output_parser import ForcedTools, OutputParser

from .folding import cut, parse

SCHEMAS = {"f": {"properties": {"text": {"type": "string"}, "number": {"type": ["integer", "null"]}}}}
WIDE = str.maketrans("|_", "\uff5c\u2581")
DEEPSEEK = ["<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>", "<|tool_calls_end|>"]
DSML = [
    text.replace("|", "\uff5c")
    for text in (
        "<|DSML|function_calls>", '<|DSML|invoke name="f">', '<|DSML|parameter name="text" string="',
        "</|DSML|parameter>", "</|DSML|invoke>", "</|DSML|function_calls>",
    )
]  # fmt: skip
FORMATS = [
    {"tools": TOOL_FORMATS["hermes"]},
    {"tools": TOOL_FORMATS["llama3_json"]},
    {"tools": TOOL_FORMATS["mistral"]},
    {"reasoning": REASONING_FORMATS["think"]},
    {"reasoning": REASONING_FORMATS["think"].after("<think>"), "tools": TOOL_FORMATS["hermes"]},
    {"reasoning": REASONING_FORMATS["mistral"], "tools": TOOL_FORMATS["mistral"]},
    {"reasoning": REASONING_FORMATS["gpt_oss"], "tools": TOOL_FORMATS["gpt_oss"]},
    {"tools": TOOL_FORMATS["gpt_oss"]},
    {"reasoning": REASONING_FORMATS["ernie45"], "tools": TOOL_FORMATS["granite"]},
    {"reasoning": REASONING_FORMATS["granite"], "tools": TOOL_FORMATS["deepseek_v3"]},
    {"tools": TOOL_FORMATS["deepseek_v31"]},
    {"tools": TOOL_FORMATS["phi4_mini_json"]},
    {"tools": TOOL_FORMATS["cohere_command_r"]},
    {"tools": TOOL_FORMATS["kimi_k2"]},
    {"tools": TOOL_FORMATS["internlm"]},
    {"tools": TOOL_FORMATS["minimax_m2"], "schemas": SCHEMAS},
    {"tools": TOOL_FORMATS["qwen3_coder"], "schemas": SCHEMAS},
    {"reasoning": REASONING_FORMATS["think"], "tools": TOOL_FORMATS["glm45"], "schemas": SCHEMAS},
    {"tools": TOOL_FORMATS["deepseek_v32"]},
    {"tools": TOOL_FORMATS["apertus"]},
    {"tools": TOOL_FORMATS["olmo3"]},
    {"tools": TOOL_FORMATS["pythonic"]},
    {"forced": ForcedTools()},
    {"forced": ForcedTools("f")},
    {},
]
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>",
    "</think>", "[THINK]", "[/THINK]", "</th", '{"name": "f", "arguments": ', '{"arguments": {"a": 1}, "name": ',
    '"parameters": ', '{"name":', '"f"', "{", "}", "[", "]", ":", ",", ";", '"', "\\", "\\u", "\\u00e9", "\\n", "12",
    "-0.5e+3", "true", "nul", " ", "\n", "word", "é",
    "<|start|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|message|>", "analysis", "final", " to=functions.f",
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>", "functools",
    "<function=", "<function=f>", "<parameter=", "<parameter=text>", "<parameter=number>\n", "</parameter>",
    "</function>", ">", "<arg_key>", "<arg_key>text</arg_key>\n<arg_value>", "</arg_key>", "<arg_value>",
    "</arg_value>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:", "<|tool_call_argument_begin|>{",
    "<|tool_call_end|>", "<|action_start|><|plugin|>", "<|action_end|>", "<minimax:tool_call>", '<invoke name="f">',
    '<parameter name="text">', "</invoke>", "</minimax:tool_call>",
    "<response>", "</response>", "Here is my ", "Here's my thought process:", "response:", "Action: ```json", "```json",
    "```", "<|tool_call|>", "<|/tool_call|>", "function", "True", *(text.translate(WIDE) for text in DEEPSEEK),
    "<function_calls>", "</function_calls>", "<|python_start|>[", "f(", "text=", "number=", "'", "\\x4", "\\x41", "(",
    ")", "True", "<|tools_prefix|>[", '{"f": ', "}]<|tools_suffix|>", "string=", '"true">', "<|python_end|>",
    *DSML,
    "\U0001f600", "\x00", '{"a": [1, {"b": "}]"}]}', "f",
]  # fmt: skip
texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=30).map("".join),
)
formats = st.sampled_from(FORMATS)
places = st.lists(st.integers(min_value=0, max_value=10_000), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=6), values, max_size=3),
    max_leaves=10,
)
arguments = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    st.dictionaries(st.text(max_size=8), json_values, max_size=4),
    st.booleans(),
    st.sampled_from([None, 2]),
)
names = st.from_regex(r"[A-Za-z0-9_.-]{1,128}", fullmatch=True)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
words = st.sampled_from(["", "Let me see.", "a < b {x} [1] ", 'é\n\n"q"', "<tool_cal"])


@given(texts, formats, places)
def test_any_cut_of_any_text_gives_the_same_answer(text, chosen, where):
    whole = parse([text], **chosen)
    assert parse(cut(text, where), **chosen) == whole
    assert parse(text, **chosen) == whole  # character by character


@given(texts, formats)
def test_nothing_is_lost(text, chosen):
    """Without calls only reasoning's tags and white space are left out; with calls, only what makes their form."""
    if "forced" in chosen:  # of which the beginning of a call is left out where the output is cut off
        text += "\0"
    answer = parse([text], **chosen)
    for char in "é\U0001f600":  # in no tag, and written in the same way in every string
        kept = answer.reasoning + answer.content + "".join(arguments for _, arguments in answer.calls)
        assert kept.count(char) == text.count(char)
    given = [chosen[key] for key in ("reasoning", "tools") if key in chosen]
    if answer.calls or any(form.has_channels or getattr(form, "answer", ()) for form in given):
        return
    if "reasoning" not in chosen or "forced" in chosen:
        assert (answer.reasoning, answer.content) == ("", text)
        return
    tags = chosen["reasoning"]
    possible = [a + answer.reasoning + b + answer.content for a in ("", *tags.starts) for b in ("", *tags.ends)]
    assert _squeezed(text) in map(_squeezed, possible)


def _squeezed(text):
    return text.translate({ord(char): None for char in " \t\r\n"})


def _hermes(calls):
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    )


def _llama(calls):
    return "<|python_tag|>" + "; ".join(f'{{"name": "{name}", "parameters": {args}}}' for name, args in calls)


def _mistral(calls):
    return "[TOOL_CALLS][" + ", ".join(f'{{"arguments": {args}, "name": "{name}"}}' for name, args in calls) + "]"


def _mistral_named(calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def _harmony(calls):
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        for name, arguments in calls
    )


def _deepseek_v3(calls):
    begin, call, separator, end, end_all = (text.translate(WIDE) for text in DEEPSEEK)
    made = (f"{call}function{separator}{name}\n```json\n{arguments}\n```{end}" for name, arguments in calls)
    return begin + "\n".join(made) + end_all


def _deepseek_v31(calls):
    begin, call, separator, end, end_all = (text.translate(WIDE) for text in DEEPSEEK)
    return begin + "".join(f"{call}{name}{separator}{arguments}{end}" for name, arguments in calls) + end_all


def _cohere(calls):
    made = (
        f'{{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {arguments}}}'
        for i, (name, arguments) in enumerate(calls)
    )
    return "<|START_ACTION|>[\n" + ",\n".join(made) + "\n]<|END_ACTION|>"


def _apertus(calls):
    return "<|tools_prefix|>[" + ", ".join(f'{{"{name}": {args}}}' for name, args in calls) + "]<|tools_suffix|>"


def _in_array(begin, end=""):
    return lambda calls: begin + _mistral(calls).removeprefix("[TOOL_CALLS]") + end


def _forced(calls):
    return "[" + ", ".join(f'{{"name": "{name}", "parameters": {args}}}' for name, args in calls) + "]"


@pytest.mark.parametrize(
    ("write", "chosen"),
    [
        (_hermes, {"tools": TOOL_FORMATS["hermes"]}),
        (_llama, {"tools": TOOL_FORMATS["llama3_json"]}),
        (_mistral, {"tools": TOOL_FORMATS["mistral"]}),
        (_mistral_named, {"tools": TOOL_FORMATS["mistral"]}),
        (_mistral_named, {"tools": TOOL_FORMATS["mistral_v11"]}),
        (_deepseek_v3, {"tools": TOOL_FORMATS["deepseek_v3"]}),
        (_deepseek_v31, {"tools": TOOL_FORMATS["deepseek_v31"]}),
        (_cohere, {"tools": TOOL_FORMATS["cohere_command3"]}),
        (_in_array("Action: ```json\n", "\n```"), {"tools": TOOL_FORMATS["cohere_command_r"]}),
        (_in_array("<tool_calls>", "</tool_calls>"), {"tools": TOOL_FORMATS["hunyuan_a13b"]}),
        (_apertus, {"tools": TOOL_FORMATS["apertus"]}),
        (_in_array("functools"), {"tools": TOOL_FORMATS["phi4_mini_json"]}),
        (_in_array("<|tool_call|>", "<|/tool_call|>"), {"tools": TOOL_FORMATS["phi4_mini_json"]}),
        (_in_array("<tool_call> "), {"tools": TOOL_FORMATS["granite"]}),
        (_forced, {"forced": ForcedTools()}),
    ],
)
@given(calls, words, words, st.sampled_from([None, "I think.", "{\n<tool_call>"]), places)
def test_well_formed_calls_come_out_with_exactly_their_json(write, chosen, calls, before, after, thought, where):
    text = write(calls)
    if "forced" in chosen:
        before = after = ""
    text = before + text + after
    if thought is not None and "forced" not in chosen:
        chosen = chosen | {"reasoning": REASONING_FORMATS["think"]}
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    answer = parse(cut(text, where), **chosen)
    assert answer.calls == calls
    assert _squeezed(answer.content) == _squeezed(before + after)
    assert answer.reasoning == (thought if "reasoning" in chosen else "")


python_keys = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
python_calls = st.lists(st.tuples(names, st.dictionaries(python_keys, json_values, max_size=4)), min_size=1, max_size=3)


@pytest.mark.parametrize("as_literal", [repr, json.dumps])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("olmo3", ("<function_calls>", "\n", "</function_calls>")),
        ("pythonic", ("<|python_start|>[", ", ", "]<|python_end|>")),
        ("pythonic", ("[", ",", "]")),
    ],
)
@given(python_calls, words, places)
def test_calls_of_python_come_out_with_what_they_say(name, form, as_literal, calls, after, where):
    begin, between, end = form
    made = (
        f"{name}({', '.join(f'{key} = {as_literal(value)}' for key, value in args.items())})" for name, args in calls
    )
    text = begin + between.join(made) + end + after
    answer = parse(cut(text, where), tools=TOOL_FORMATS[name])
    assert [(called, json.loads(args)) for called, args in answer.calls] == calls
    assert _squeezed(answer.content) == _squeezed(after)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[]"),
        ("pythonic", "[1] says"),
        ("pythonic", "[link](a)"),
        ("pythonic", "[f(1)]"),
        ("olmo3", "<function_calls></function_calls>"),
        ("olmo3", "<function_calls>f</function_calls>"),
        ("apertus", "<|tools_prefix|>[1]"),
        ("deepseek_v32", DSML[0] + DSML[1].replace("f", "")),
    ],
)
def test_what_is_no_call_stays_content(name, text):
    answer = parse(text, tools=TOOL_FORMATS[name])
    assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        (r"""f(a='it\'s "b"\n', b="\x41\u00e9\d\U0001F600")""", {"a": 'it\'s "b"\n', "b": "A\u00e9\\d\U0001f600"}),
        (r"""f(b='\xzz\u12\U00110000')""", {"b": "\\xzz\\u12\\U00110000"}),
        (
            "f(a=[1, 2.5, ], b={'c': None, \"d\": [True, false,],},)",
            {"a": [1, 2.5], "b": {"c": None, "d": [True, False]}},
        ),
        ("f( a = -1 )", {"a": -1}),
        ("f()", {}),
    ],
)
def test_literals_of_python_are_read_as_python_reads_them(said, arguments):
    answer = parse(f"[{said}]", tools=TOOL_FORMATS["pythonic"])
    assert [(name, json.loads(args)) for name, args in answer.calls] == [("f", arguments)]


@pytest.mark.parametrize("broken", ["x", "01", "{1: 2}", "{'a' 1}", "[1 2]", "1 2", "[" * 200])
def test_values_that_are_none_end_the_call(broken):
    answer = parse(f"[f(a=1, b={broken}) rest", tools=TOOL_FORMATS["pythonic"])
    ((name, args),) = answer.calls
    assert name == "f"
    assert args.startswith('{"a": 1, "b": ')
    assert answer.content.endswith(") rest")


def test_deepseek_says_whether_a_value_is_a_text():
    begin, call, key, end_key, end_call, end = DSML
    text = f'{begin}\n{call}\n{key}true">5{end_key}\n{key.replace("text", "b")}false">[5]{end_key}\n{end_call}\n{end}'
    answer = parse(text, tools=TOOL_FORMATS["deepseek_v32"])
    assert [(name, json.loads(args)) for name, args in answer.calls] == [("f", {"text": "5", "b": [5]})]
    assert answer.content == ""


@given(calls, st.sampled_from([_hermes, _llama, _mistral_named, _harmony, _deepseek_v3, _forced]), formats, st.data())
def test_mutations_of_well_formed_output_never_raise(calls, write, chosen, data):
    text = list(f"before {write(calls)} after")
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.sampled_from([*FRAGMENTS, ""]))
    text = "".join(text)
    assert parse(text, **chosen) == parse([text], **chosen)


HOSTILE = [
    "<tool_call>", "<tool_call", "<tool_call>{", '<tool_call>{"name": "f", "arguments": ', '{"arguments": {"a": ',
    "[TOOL_CALLS][{", "[", '{"a":', '"', "\\", "1", " ", "\n", "<", "</think", "<|python_tag|>{", ";",
    '{"arguments": {}, "name": "f"}; ', "<function=", "<parameter=text>", "<|start|>", "<|channel|>final<|message|>",
    "<|start|>assistant to=functions.f<|message|>{}", "</parameter>",
]  # fmt: skip
OPENINGS = [
    "",
    "<tool_call>",
    '<tool_call>{"arguments": {"a": ',
    '<tool_call>{"name": "f", "arguments": {"a": "',
    "<think>",
    "<function=f>\n<parameter=text>",
    "<function=f>\n<parameter=other>",
    "<tool_call>f\n<arg_key>number</arg_key>\n<arg_value>",
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in (1, 2))])
@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("chosen", FORMATS)
def test_hostile_text_takes_linear_work(chosen, opening, part):
    """Twice the text makes at most about twice the function calls, whole or character by character. Of the units that
    are repeated, each part has a third, another one in each case."""
    for unit in HOSTILE[(FORMATS.index(chosen) + OPENINGS.index(opening) + part) % 3 :: 3]:
        for whole in (True, False):
            few, many = (_num_calls(opening + unit * (size // len(unit)), chosen, whole) for size in (250, 500))
            assert many <= 2.2 * few + 1000, unit  # some units change their meaning after 128 characters


def _num_calls(text, chosen, whole):
    num_calls = 0

    def count(frame, event, arg):
        nonlocal num_calls
        num_calls += 1

    parser = OutputParser(**chosen)
    sys.setprofile(count)
    try:
        for piece in [text] if whole else text:
            parser.feed(piece)
        parser.finish()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("unit", ["abc", "1", '\\"', "<tool_call", "</thin"])
@pytest.mark.parametrize("opening", ["", "<think>", '<tool_call>{"name": "f", "arguments": {"a": "'])
def test_only_a_few_characters_wait(opening, unit):
    """So what is kept to be looked at again is short, however long the text."""
    parser = OutputParser(reasoning=REASONING_FORMATS["think"], tools=TOOL_FORMATS["hermes"], new_id=lambda: "")
    parser.feed(opening)
    num_waiting = 0
    for char in unit * 400:
        num_waiting += 1 - sum(len(getattr(p, "text", "") or getattr(p, "arguments", "")) for p in parser.feed(char))
        assert num_waiting < 20
