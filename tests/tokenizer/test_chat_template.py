"""Conversations written down as transformers writes them; what is broken is refused, and no template runs wild."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import InvalidPromptError, RequestError, TokenizerError
from quire.text.chat_template import budget as template_budget
from quire.text.tokenizer.tokenizer import Tokenizer

from .hostile_templates import ENDLESS, ESCAPES
from .made import EMBEDDED

USER = {"role": "user", "content": "What does json.dumps do?"}
CHAT = [{"role": "system", "content": "Be short. "}, USER, {"role": "assistant", "content": "It writes JSON, and "}]
TOOLS = [{"type": "function", "function": {"name": "find", "description": 'for <a> & "b"', "parameters": {"é": [1]}}}]
CHAT_ML = (
    "{% for m in messages %}\n    {% if m.role != 'none' %}\n<|im_start|>{{ m['role'] + '\\n' + m['content'] }}"
    "<|im_end|>\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}{% if loop.first and message.role == 'system' %}[{{ message.content | "
    "trim }}]{% continue %}{% endif %}{% generation %}{{ loop.index }}/{{ loop.length }}:{{ message.content.strip() }}"
    "{% endgeneration %}{{ eos_token if not loop.last }}{% endfor %}"
)
WITH_TOOLS = (
    "{%- macro show(tool) -%}{{ tool.function | tojson(indent=2) }}{%- endmacro -%}"
    "{%- if tools %}{% for tool in tools %}{{ show(tool) }}{% endfor %}{{ tools | tojson }}{% endif -%}"
    "{%- set ns = namespace(n=0, text='') -%}{%- for m in messages[::-1] -%}{%- set ns.n = ns.n + 1 -%}"
    "{%- set ns.text = ns.text ~ m.role ~ ns.n ~ '%05d' % ns.n -%}{%- endfor -%}{{ ns.text }}{{ date_string }}"
    "{{ ['a', 'b'] | join(', ') }}{{ messages[0].content.replace('e', 'E').split(' ')[0] }}{{ 'x' * 3 }}"
    "{{ messages[-1].content }}."
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(EMBEDDED)


def folder_with(tmp_path: Path, **config: Any) -> Path:
    """The embedded tokenizer without its template, and this configuration."""
    shutil.copy(EMBEDDED / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | config))
    return tmp_path


@pytest.mark.parametrize("template", [None, CHAT_ML, TRIMMING, WITH_TOOLS])
@pytest.mark.parametrize("options", [{"add_generation_prompt": True}, {"continue_final_message": True}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_same_text_as_transformers(template: str | None, options: dict[str, bool], tools: Any) -> None:
    import transformers

    options = {"add_generation_prompt": False, "continue_final_message": False} | options
    given = {"chat_template": template, "tools": tools, "date_string": "26 Jul 2024", **options}
    theirs = transformers.AutoTokenizer.from_pretrained(EMBEDDED, bos_token="<|endoftext|>")
    ours = Tokenizer.from_path(EMBEDDED)
    ours.special_tokens = {**ours.special_tokens, "bos_token": "<|endoftext|>"}
    assert ours.apply_chat_template(CHAT, **given) == theirs.apply_chat_template(CHAT, tokenize=False, **given)


CALLED = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "  Weather in Ulm?\n"},
    {
        "role": "assistant",
        "content": "",
        "thinking": "Ask <b>.",
        "tool_calls": [{"function": {"name": "find", "arguments": {"city": "Ulm", "days": [1, 2], "é": None}}}],
    },
    {"role": "tool", "content": '{"rain": true}'},
]
DOCUMENTED = {"documents": [{"title": "b", "text": "2"}, {"title": "A", "text": "1"}], "model_identity": "You are Q."}
FEATURES = [
    "{%- if not messages %}{{ raise_exception('none') }}{%- endif %}{{ strftime_now('%Y-%m-%d')[:4] | length }}",
    "{{ model_identity | default('You are X.') }}{{ reasoning_effort | default('medium', true) | capitalize }}",
    "{%- for name, value in messages[2].tool_calls[0].function.arguments.items() -%}"
    "<{{ name }}>{{ value | tojson(ensure_ascii=False) if value is not string else value }}{%- endfor %}",
    "{%- for name, value in (messages[2].tool_calls[0].function.arguments | items) %}"
    "{{ name ~ loop.index0 }}{% endfor %}",
    "{%- for m in messages %}{% if m.role == 'developer' %}{% continue %}{% elif m['role'] == 'tool' %}{% break %}"
    "{% endif %}{{ m.content.strip() }}|{% endfor %}",
    "{{ messages[1].content.split('in ')[-1].lstrip().rstrip('\\n').replace('?', '!').title() }}"
    "{{ messages[1].content.lstrip().startswith('Weather') and messages[1].content.endswith('\\n') }}"
    "{{ messages[1].content[2:-1] }}{{ messages[::-1][0].role }}{{ messages[0].content.upper().find('SHORT') }}",
    "{{ messages[2].get('thinking', '') }}{{ messages[0].get('thinking') is none }}{{ 'thinking' in messages[2] }}",
    "{%- for m in messages %}{{ m is mapping }}{{ m.role is string }}{{ m.tool_calls is defined }}"
    "{{ (m.tool_calls or []) is iterable }}{{ m.nothing is undefined }}{{ [m] is sequence }}{% endfor %}{{ 3 is odd }}",
    "{%- for d in documents | sort(attribute='title') %}{{ loop.index }}:{{ d['title'] }}={{ d.text }}{% endfor %}"
    "{{ documents | map(attribute='title') | unique | list | join(',') }}{{ {'b': 1, 'a': 2} | dictsort }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first | trim }}"
    "{{ messages | rejectattr('role', 'in', ['user', 'tool']) | list | length }}{{ messages | last | tojson }}",
    "{%- macro kind(spec, depth=0) -%}{%- if spec is mapping -%}{{ '{' }}{%- for key, value in spec.items() -%}"
    "{{ key }}: {{ kind(value, depth + 1) }}{{ ', ' if not loop.last }}{%- endfor -%}{{ '}' }}{%- else -%}"
    "{{ spec }}@{{ depth }}{%- endif -%}{%- endmacro -%}"
    "{{ kind(tools[0].function if tools else {'a': {'b': 1}}) }}",
    "{%- set ns = namespace(last=-1, seen=false) -%}{%- for m in messages -%}"
    "{%- if m.role == 'user' and not ns.seen -%}{%- set ns.last = loop.index0 -%}"
    "{%- set ns.seen = true -%}{%- endif -%}{%- endfor -%}{{ ns.last }}",
    "{% set text %}{{ messages[0].content }}{% endset %}{{ text | trim | upper }}{{ range(2, 5) | list }}"
    "{%- macro wrap() %}[{{ caller('y') }}]{% endmacro %}{% call(x) wrap() %}{{ x }}{% endcall %}",
    "{% generation %}{{ messages[0].content | tojson(indent=1, separators=(',', ':'), sort_keys=True) }}"
    "{% endgeneration %}{{ '%s/%02d' % ('a', 7) }}{{ '{}-{x}'.format(1, x='b') }}{{ 'a' 'b' }}{{ 7 // 2 }}"
    "{{ [1] + [2] }}",
    "{# developer #}{%- for m in messages recursive %}{{ loop.previtem.role if loop.previtem is defined else '^' }}"
    "{{ loop.nextitem.role if not loop.last else '$' }}{{ loop.cycle('x', 'y') }}{% endfor %}"
    "{% filter upper %}a{% endfilter %}{{ 'x' if true is true and none is none and 1 is number and 1 is integer }}",
    "{{ builtin_tools is defined and 'python' in builtin_tools }}{{ (documents or []) | length > 1 }}"
    "{{ dict(a=1, **{'b': 2}) | tojson }}{{ messages[0] | attr('missing') | default('?') }}{{ '<&>' | e }}"
    "{% with a = 1 %}{{ a }}{% endwith %}{# a comment #}{{ ['b', 'a'] | sort | reverse | list }}",
]


@pytest.mark.parametrize("template", FEATURES)
@pytest.mark.parametrize("more", [{}, DOCUMENTED | {"reasoning_effort": "high", "builtin_tools": ["python"]}])
def test_what_templates_of_families_use_gives_the_same_text_as_transformers(template: str, more: Any) -> None:
    import transformers

    given = {"chat_template": template, "tools": TOOLS if more else None, "documents": None, **more}
    theirs = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
    if "documents |" in template and not more:
        given |= {"documents": []}
    text = Tokenizer.from_path(EMBEDDED).apply_chat_template(CALLED, add_generation_prompt=True, **given)
    assert text == theirs.apply_chat_template(CALLED, tokenize=False, add_generation_prompt=True, **given)
    assert text


def test_the_embedded_template_and_its_tokens(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([USER])
    assert text == "<|im_start|>user\nWhat does json.dumps do?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text, add_special_tokens=False)[0] == 1


@pytest.mark.parametrize(("more", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_has_the_role_of_the_system_where_the_template_has_no_other(tokenizer, more, role) -> None:
    template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}" + more
    messages = [{"role": "developer", "content": "Be short."}, USER]
    text = tokenizer.apply_chat_template(messages, chat_template=template)
    assert text == f"[{role}: Be short.][user: {USER['content']}]"
    assert messages[0]["role"] == "developer"


def test_the_caller_keeps_its_messages(tokenizer: Tokenizer) -> None:
    messages = [dict(message) for message in CHAT]
    tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == CHAT


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
READS_PARTS = (
    "{{ bos_token + ':' }}{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ messages[0].content | trim }}",
        "{{ messages[0].content | tojson }}",
        "{{ messages[0]['content'] + '' }}",
        "{% set c = messages[0].content %}{{ c if c is string else raise_exception('text only') }}",
    ],
)
def test_parts_are_joined_for_a_template_that_wants_text(tokenizer: Tokenizer, template: str) -> None:
    given = [{"role": "user", "content": PARTS}]
    assert tokenizer.apply_chat_template(given, chat_template=template).strip('"') in ("one\ntwo", "one\\ntwo")


@pytest.mark.parametrize("options", [{}, {"continue_final_message": True, "add_generation_prompt": False}])
def test_a_template_that_reads_parts_gets_them_as_transformers_gives_them(options: dict[str, bool]) -> None:
    import transformers

    given = [{"role": "system", "content": "text"}, {"role": "user", "content": PARTS}]
    theirs = transformers.AutoTokenizer.from_pretrained(EMBEDDED, bos_token="<|endoftext|>", chat_template=READS_PARTS)
    ours = Tokenizer.from_path(EMBEDDED)
    ours.special_tokens = {**ours.special_tokens, "bos_token": "<|endoftext|>"}
    text = ours.apply_chat_template(given, chat_template=READS_PARTS, **options)
    assert text == theirs.apply_chat_template(given, tokenize=False, **options)
    assert "text[one][two" in text


def test_variables_of_one_request_do_not_change_how_another_s_content_is_passed(tokenizer: Tokenizer) -> None:
    template = "{{ (mark or '') + ':' }}{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    given = [{"role": "user", "content": PARTS}]
    with pytest.raises(InvalidPromptError):
        tokenizer.apply_chat_template(given, chat_template=template, mark=5)
    assert tokenizer.apply_chat_template(given, chat_template=template) == ":[one][two]"


def test_content_that_is_none_is_no_content(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ 'content' in m }},{% endfor %}"
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": []}]
    assert tokenizer.apply_chat_template(messages, chat_template=template) == "True,False,"


def test_the_date_can_be_had(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template([USER], chat_template="{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "config"}, {}, "config"),
        ({"chat_template": "config"}, {"chat_template.jinja": "file"}, "file"),
        ({"chat_template": [{"name": "default", "template": "listed"}]}, {}, "listed"),
        ({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}, {}, "ab"),
        ({}, {"chat_template.jinja": "a", "additional_chat_templates/tool_use.jinja": "b"}, "ab"),
    ],
)
def test_where_templates_are_found(tmp_path: Path, config: Any, files: dict[str, str], expected: str) -> None:
    folder_with(tmp_path, **config)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tokenizer = Tokenizer.from_path(tmp_path)
    texts = [tokenizer.apply_chat_template([USER]), tokenizer.apply_chat_template([USER], tools=TOOLS)]
    assert texts == list(expected) if expected == "ab" else [expected] * 2


def test_a_missing_template_says_what_there_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bare = Tokenizer.from_path(folder_with(tmp_path))
    assert not bare.chat_templates
    with pytest.raises(TokenizerError, match="has no chat template: give a template with"):
        bare.apply_chat_template([USER])
    with pytest.raises(TokenizerError, match="has only these chat templates: default"):
        tokenizer.apply_chat_template([USER], chat_template="tool_use")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "list of messages"),
        (USER, "list of messages"),
        ([USER, "hello"], r"messages\[1\] must be a dict"),
        ([{"content": "x"}], r"messages\[0\] must be a dict with a 'role'"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] must be a dict with a 'role'"),
        ([{"role": "user", "content": 3}], "'content' must be text or a list of text parts, not int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "only text parts"),
        ([{"role": "user", "content": "x", "extra": object()}], "contains a object: only types of JSON"),
    ],
)
def test_malformed_messages_are_refused(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize("tools", ["find", [3], {"name": "find"}])
def test_malformed_tools_are_refused(tokenizer: Tokenizer, tools: Any) -> None:
    with pytest.raises(InvalidPromptError, match="JSON schema"):
        tokenizer.apply_chat_template([USER], tools=tools)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejects these messages: roles must alternate"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 3 }}", "fails on these messages: TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)
def test_what_a_template_refuses_is_a_wrong_request(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        tokenizer.apply_chat_template([USER], chat_template=template)


def test_contradictory_endings_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidPromptError, match="set one of them to False"):
        tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidPromptError, match="leaves out the final message"):
        tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=False, continue_final_message=True, chat_template="{{ messages[0].role }}"
        )


@pytest.mark.parametrize(
    "template", ["{% if %}", "{% for m in messages %}", "{{ 'a' | nonsense }}", "{% for a in b %}" * 99]
)
def test_a_broken_template_is_the_checkpoints_fault(tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises((TokenizerError, InvalidPromptError)):
        tokenizer.apply_chat_template([USER], chat_template=template)


@pytest.mark.parametrize("template", ENDLESS, ids=lambda template: template[:60])
def test_no_template_runs_or_grows_without_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.5)
    start_s = time.process_time()
    with pytest.raises((TokenizerError, RequestError)):
        tokenizer.apply_chat_template([USER], chat_template=template)
    assert time.process_time() - start_s < 8


@pytest.mark.parametrize("template", ["{{ " + "1" * 5000 + " }}", "{{ 'a' " * 20_000])
def test_what_cannot_be_compiled_is_refused(tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises(TokenizerError, match=r"the chat template (is invalid at line|cannot be compiled)"):
        tokenizer.apply_chat_template([USER], chat_template=template)


def test_python_s_warnings_of_a_template_do_not_reach_the_log() -> None:
    program = "from quire.text.chat_template.template import ChatTemplate; ChatTemplate('{{ 5[1:] }}')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


def test_what_templates_do_with_lists_and_numbers_still_works(tokenizer: Tokenizer) -> None:
    template = (
        "{{ [1, 2, 3] | batch(2, 0) | list }} {{ [1, 2] | sum }} {{ [{'a': 2}] | sum('a', 1) }} {{ 2.5 | round }} "
        "{{ 'a b'.split() }} {{ messages | map(attribute='role') | map('upper') | list }} {{ 'é'.expandtabs() }} "
        "{{ messages | selectattr('role', 'eq', 'user') | list | length }} {{ 'x' in ['x'] and not 'x' == 'y' }} "
        "{{ {'a': (1, 2)}.items() | list }} {{ {'a': 1} | tojson(separators=(',', ':')) }} {{ 'ab' | title }} "
        "{{ [3, 1] | sort | first }} {{ 7 // 2 - 1 / 2 }} {{ '%s-%s' % ('a', [1]) }} {{ 'a' ~ 1 ~ [none] }} "
        "{% for a, b in [(1, 2)] %}{{ a + b }}{% endfor %} {{ [1, 2, 3][1:] }} {{ '{:>3}'.format(1) }}"
    )
    expected = (
        "[[1, 2], [3, 0]] 3 3 2.0 ['a', 'b'] ['USER'] é 1 True [('a', (1, 2))] {\"a\":1} Ab 1 2.5 a-[1] a1[None] "
        "3 [2, 3]   1"
    )
    assert tokenizer.apply_chat_template([USER], chat_template=template) == expected


@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_gets_out_of_the_sandbox(tokenizer: Tokenizer, template: str) -> None:
    try:
        outcome = tokenizer.apply_chat_template([USER], chat_template=template)
    except (TokenizerError, InvalidPromptError) as error:
        outcome = str(error)
    assert outcome == "" or re.search("not safe to run|is undefined|no loader|Undefined", outcome), outcome


def test_ordinary_numbers_and_long_conversations_pass(tokenizer: Tokenizer) -> None:
    content = "call 0123456789 or 20240726, 100%"
    template = "{{ messages[0].content.strip() }} {{ '%d' % 123456 }} {{ '{}'.format(7654321) }} {{ 10 ** 6 * 3 }}"
    expected = f"{content} 123456 7654321 3000000"
    assert tokenizer.apply_chat_template([{"role": "user", "content": content}], chat_template=template) == expected
    long = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(tokenizer.apply_chat_template(long)) > 2_000_000


@pytest.mark.parametrize(("given", "shown"), [("string", "one\ntwo|x"), ("openai", "[one][two]|[x]")])
def test_the_form_of_content_can_be_chosen(tokenizer: Tokenizer, given: str, shown: str) -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text"
        " }}]{% endfor %}{% endif %}{{ '|' if not loop.last }}{% endfor %}"
    )
    messages = [{"role": "user", "content": PARTS}, {"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, chat_template=template, content_format=given) == shown
