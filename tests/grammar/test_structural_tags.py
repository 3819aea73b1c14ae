"""Structural tags: which texts they allow, and which tags are refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire import InvalidParamsError, StructuredOutputsParams
from quire.text.grammar.source import library_grammar
from tests.grammar.masked_engine import masked_llm, structured

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
AS_CITY = {"type": "json_schema", "json_schema": CITY}
OSLO = '{"city": "Oslo"}'
OLD_FORM = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=get>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=set>", "schema": {"type": "integer"} | {"minimum": 5}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
ANY = {"type": "any_text"}


def tag(begin: Any = "<a>", content: Any = AS_CITY, end: Any = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<a", "[b"], "tags": [tag(), tag("[b]", end="")], **more}


def listed(**more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [tag(), tag("[b]", end="")], "separator": ", ", **more}


ONE = f"<a>{OSLO}</a>"
TWO = f"[b]{OSLO}"
IM_END = "\0"
"""Stands for a token of the vocabulary that is no text."""


@pytest.fixture(scope="module")
def allows() -> Callable[[dict[str, Any], str], bool]:
    """Whether a tag has this text as an output."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = masked_llm()[0].engine.tokenizer
    library = LLTokenizer(tokenizer.to_json())
    (im_end,) = [i for i, text in tokenizer.special_token_texts.items() if text == "<|im_end|>"]

    def allows(given: dict[str, Any] | str, text: str) -> bool:
        matcher = LLMatcher(library, library_grammar(StructuredOutputsParams(structural_tag=given)))
        assert not matcher.get_error()
        parts = [library.tokenize_str(part) for part in text.split(IM_END)]
        tokens = [*parts[0], *(token for part in parts[1:] for token in (im_end, *part))]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return allows


@pytest.mark.parametrize("given", [OLD_FORM, json.dumps(OLD_FORM)], ids=["dict", "text"])
def test_the_old_form_is_free_text_with_tags(allows, given) -> None:
    for text in ("", "<f", "Hello {}", f"so <f=get>{OSLO}</f>\nand <f=set>7</f>", "<f=set>7</f>"):
        assert allows(given, text), text
    for text in ("<f=", "<f=put>", "<f=set>1</f>", f"<f=get>{OSLO}", f"<f=set>{OSLO}</f>", "<f=get>\n{}</f>"):
        assert not allows(given, text), text


NUMBER = {"type": "regex", "pattern": "a/[0-9]{2}"}
QUOTED = {"type": "const_string", "value": '"é😀\n\t\\/'}
END = {"type": "token", "token": 2}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (QUOTED, [QUOTED["value"]], ["", QUOTED["value"] + "x"]),
        (NUMBER, ["a/12"], ["a/1", "/a/12/"]),
        (AS_CITY, [OSLO], ["{}", ""]),
        (ANY, ["", "x\n\ny"], []),
        (AS_CITY | {"style": "json", "any_order": True}, [OSLO], ["{}"]),
        (ANY | {"excludes": [], "max_tokens": None, "max_chars": None}, ["x"], []),
        ({"type": "sequence", "elements": [NUMBER, AS_CITY, ANY]}, [f"a/12{OSLO}", f"a/12{OSLO} so"], ["a/12"]),
        ({"type": "or", "elements": [NUMBER, AS_CITY]}, ["a/12", OSLO], [f"a/12{OSLO}", ""]),
        ({"type": "or", "elements": [NUMBER, ANY]}, ["a/12", "a/1"], []),
        (tag(), [ONE], [OSLO, f" {ONE}", f"<a>{OSLO}"]),
        (tag(content=ANY, end=["</a>", "."]), ["<a>b</a>", "<a></a>", "<a>b."], ["<a>b", "<a>b</a>c", "<a>b.</a>"]),
        (tag(content=ANY, end=END), [f"<a>b</a>{IM_END}"], ["<a>b</a>"]),
        (tag(begin=END, end=END), [f"{IM_END}{OSLO}{IM_END}"], [OSLO, f"{IM_END}{OSLO}"]),
        (triggered(), ["", "x", ONE, f"x{ONE}y{TWO}z"], ["<a", "x[b", f"{TWO}<ab"]),
        (triggered(at_least_one=True), [ONE, f"{TWO}x{ONE}y"], ["", "x", f"x{ONE}"]),
        (triggered(stop_after_first=True), ["", "x", f"x{ONE}", TWO], [f"{ONE}x", ONE + TWO]),
        (triggered(stop_after_first=True, at_least_one=True), [ONE, TWO], ["", f"x{ONE}", ONE + TWO]),
        (triggered(triggers=["<a", "[b", "never"], excludes=[]), ["never", ONE], ["<a"]),
        (listed(), ["", ONE, f"{ONE}, {TWO}"], ["x", ONE + TWO, f"{ONE}, "]),
        (listed(at_least_one=True), [TWO], [""]),
        (listed(stop_after_first=True), ["", ONE], [f"{ONE}, {TWO}"]),
    ],
)  # fmt: skip
def test_each_format_allows_its_texts(allows, form, good, bad) -> None:
    given = {"type": "structural_tag", "format": form}
    assert [text for text in good if not allows(given, text)] == []
    assert [text for text in bad if allows(given, text)] == []


def test_options_of_json_apply_within_tags(allows) -> None:
    form = {"format": AS_CITY}
    assert allows(form, '{\n  "city":\n "Oslo", "country": 1}')
    closed = {"disable_any_whitespace": True, "disable_additional_properties": True}
    grammar = library_grammar(StructuredOutputsParams(structural_tag=form, **closed))
    assert '"whitespace_flexible":false' in grammar.replace("\\", "")
    assert '"additionalProperties":false' in grammar.replace("\\", "")


def test_a_masked_model_writes_tags() -> None:
    llm, _ = masked_llm()
    short = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = triggered(
        tags=[tag(content={"type": "json_schema", "json_schema": short})], triggers=["<a>"], at_least_one=True
    )
    params = structured(seed=1, temperature=1.5, structural_tag={"format": form})
    (output,) = llm.generate(["a"], params, use_tqdm=False)
    whole, *rest = output.outputs[0].text.removeprefix("<a>").partition("</a>")
    assert set(json.loads(whole)) == {"a"}
    assert rest[0] == "</a>"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ("5", "Expected `object`, got `int`"),
        (
            {},
            "missing required field `structures`; give either 'format', of the types const_string, json_schema, regex",
        ),
        ({"type": "tag", "format": ANY}, "Invalid value 'tag' - at `$.type`"),
        ({"format": {"type": "grammar"}}, "Invalid value 'grammar' - at `$.format.type`"),
        ({"format": tag(content={"type": "qwen"})}, "Invalid value 'qwen' - at `$.format.content.type`"),
        ({"format": {"type": "tag", "begin": ""}}, "missing required field `content` - at `$.format`"),
        ({"format": AS_CITY | {"style": "qwen_xml"}}, "at `$.format.style`"),
        ({"format": ANY | {"excludes": ["x"]}}, "at `$.format.excludes`"),
        ({"format": ANY | {"max_tokens": 5}}, "at `$.format.max_tokens`"),
        ({"format": {"type": "token", "token": -1}}, "at `$.format.token`"),
        ({"format": {"type": "sequence", "elements": []}}, "at `$.format.elements`"),
        ({"format": {"type": "sequence", "elements": [ANY, AS_CITY]}}, "any_text and triggered_tags must be the last"),
        ({"format": {"type": "sequence", "elements": [NUMBER, ANY, NUMBER]}}, "any_text and triggered_tags must be"),
        ({"format": tag(content=triggered())}, "the content of a tag must not be endless"),
        ({"format": tag(content={"type": "or", "elements": [NUMBER, ANY]})}, "must not be endless"),
        ({"format": tag(content={"type": "sequence", "elements": [NUMBER, ANY]})}, "must not be endless"),
        ({"format": tag(content={"type": "sequence", "elements": [NUMBER, NUMBER, ANY]})}, "must not be endless"),
        ({"format": tag(content=ANY, end="")}, "any_text with an end that is not empty"),
        ({"format": triggered(triggers=["<a"])}, "tags[1].begin must begin with exactly one of the triggers"),
        ({"format": triggered(triggers=["<a", "<a>", "[b"])}, "tags[0].begin must begin with exactly one"),
        ({"format": triggered(tags=[tag(begin=END)])}, "tags[0].begin must begin with exactly one"),
        ({"format": triggered(triggers=["<a"] * 129)}, "Expected `array` of length <= 128"),
        ({"format": triggered(tags=[tag()] * 1025)}, "Expected `array` of length <= 1024"),
        (OLD_FORM | {"triggers": []}, "at `$.triggers`"),
        (OLD_FORM | {"structures": [{"begin": "<f=", "end": ""}]}, "missing required field `schema`"),
        (OLD_FORM | {"more": 1}, "unknown field `more`"),
    ],
)
def test_refused_when_made(given, message) -> None:
    with pytest.raises(InvalidParamsError) as raised:
        StructuredOutputsParams(structural_tag=given)
    assert str(raised.value).startswith("structural_tag is refused: ")
    assert message in str(raised.value)


def test_a_deep_tag_is_refused() -> None:
    form: dict[str, Any] = ANY
    for _ in range(100_000):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(InvalidParamsError, match="structural_tag"):
        StructuredOutputsParams(structural_tag={"format": form})
    while "elements" in form:  # taken apart one by one: freeing it at once would recurse
        (form,) = form.pop("elements")
