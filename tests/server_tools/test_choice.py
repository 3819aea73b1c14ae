"""Tools and tool_choice of a request: what is refused, and what grammar a choice forces."""

import json

import msgspec
import pytest
from jsonschema import Draft202012Validator

from quire.common.errors import InvalidParamsError
from quire.server.api.chat.protocol import ChatCompletionRequest, FunctionDefinition, Tool
from quire.server.api.tools.choice import allowed_tools, check_tools, forced_tools, tool_choice_structure
from quire.server.api.tools.output_parser import ForcedTools
from quire.text.grammar.source import library_grammar


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def named(name="f"):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def request(tools, choice=None):
    """The tools and the choice as the body of a request gives them. Raises msgspec.ValidationError."""
    body = {"messages": [], "tools": tools, "tool_choice": choice}
    decoded = msgspec.convert(body, ChatCompletionRequest)
    return decoded.tools, decoded.tool_choice


def nested(depth):
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {}


TREE = {
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/v"}, "left": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"v": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, None),
        (None, "auto"),
        ([], "none"),
        ([tool()], "required"),
        ([tool()], "any"),
        ([tool(), tool("g")], allowed("auto", "g", "f")),
        ([tool(description=None, parameters=None), tool("g-1.x_Y", parameters={})], named("g-1.x_Y")),
        ([{"function": {"name": "f"}}], {"function": {"name": "f"}}),
        ([tool(parameters=TREE, strict=True)], "auto"),
        ([tool(f"f{i}") for i in range(128)], None),
    ],
)
def test_tools_that_can_be_served_are_taken(tools, choice):
    check_tools(*request(tools, choice))


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ({}, None, r"Expected `array \| null`, got `object` - at `\$.tools`"),
        ("f", None, r"Expected `array \| null`, got `str` - at `\$.tools`"),
        ([tool(), 3], None, r"Expected `object`, got `int` - at `\$.tools\[1\]`"),
        ([{"type": "function"}], None, r"missing required field `function` - at `\$.tools\[0\]`"),
        ([{"type": "web_search", "function": {"name": "f"}}], None, r"Invalid enum value 'web_search' - at .*type"),
        ([tool(), tool(None)], None, r"Expected `str`, got `null` - at `\$.tools\[1\].function.name`"),
        ([tool(description=1)], None, r"Expected `str \| null`, got `int` - at `\$.tools\[0\].function.description`"),
        ([tool(parameters=[])], None, r"Expected `object \| null`, got `array` - at .*function.parameters`"),
        ([tool()], "Auto", "Invalid enum value 'Auto' - at `\\$.tool_choice`"),
        ([tool()], 1, r"got `int` - at `\$.tool_choice`"),
        ([tool()], {"type": "function"}, r"missing required field `function` - at `\$.tool_choice`"),
        ([tool()], {"type": "custom"}, r"Invalid enum value 'custom' - at `\$.tool_choice.type`"),
        ([tool()], {"type": "allowed_tools"}, r"missing required field `allowed_tools` - at `\$.tool_choice`"),
        ([tool()], allowed("any", "f"), r"Invalid enum value 'any' - at `\$.tool_choice.allowed_tools.mode`"),
        ([tool()], allowed("auto"), r"length >= 1 - at `\$.tool_choice.allowed_tools.tools`"),
    ],
)
def test_tools_of_wrong_types_are_refused_when_they_are_decoded(tools, choice, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        request(tools, choice)


def test_text_that_is_not_unicode_is_refused_when_it_is_decoded():
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(json.dumps({"tools": [tool(description="\ud800")]}))


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([tool("a b")], None, r"tools\[0\].function.name='a b': must be 1 to 128 letters"),
        ([tool("f\n")], None, r"tools\[0\].function.name"),
        ([tool("x" * 129)], None, r"tools\[0\].function.name"),
        ([tool(), tool("g"), tool()], None, r"tools\[2\].function.name: 'f' is already the name of tools\[0\]"),
        ([tool(parameters={"type": "string"})], None, r"parameters.type='string': must be 'object'"),
        ([tool(parameters=nested(40))], None, r"tools\[0\].function is nested too deeply"),
        ([tool(f"f{i}") for i in range(129)], None, "tools has 129 functions: at most 128"),
        ([tool(description="x" * 200_000)], None, "tools has 200,.* bytes as JSON: at most 196,608"),
        ([tool("search")], named("serch"), "tool_choice.function.name='serch' is not one of the tools, did you mean"),
        ([tool("search")], allowed("auto", "serch"), "tool_choice.allowed_tools='serch' is not one of the tools, did"),
        (None, "required", "tool_choice='required', but tools is empty"),
        (None, "any", "tool_choice='any', but tools is empty"),
        (None, named(), "tool_choice.function.name='f' is not one of the tools"),
    ],
)
def test_wrong_tools_are_refused_by_their_place(tools, choice, message):
    with pytest.raises(InvalidParamsError, match=message):
        check_tools(*request(tools, choice))


def test_what_is_too_deep_for_recursion_is_refused_too():
    schema = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(InvalidParamsError, match="nested too deeply"):
        check_tools([Tool(function=FunctionDefinition(name="f", parameters=schema))])
    while schema:  # taken apart one by one: freeing it at once would recurse
        schema = schema["not"]


def test_a_choice_may_allow_some_of_the_tools():
    given = request([tool(), tool("g"), tool("h")], allowed("required", "h", "f"))
    tools, choice = allowed_tools(*given)
    assert [one.function.name for one in tools] == ["f", "h"]
    assert choice == "required"
    for choice in (None, "auto", "any", named()):
        given = request([tool(), tool("g")], choice)
        assert allowed_tools(*given) == given


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_free_choice_forces_nothing(choice):
    given = request([tool()], choice)
    assert tool_choice_structure(*given) is forced_tools(*given) is None


def test_a_named_function_forces_its_arguments():
    tools = [tool("g", parameters={}), tool("h"), tool("tree", parameters=TREE)]
    assert forced_tools(*request(tools, named("tree"))) == ForcedTools("tree")
    structure = tool_choice_structure(*request(tools, named("tree")))
    assert structure.json == TREE
    assert tool_choice_structure(*request(tools, named("g"))).json == {"type": "object"}
    no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
    assert tool_choice_structure(*request(tools, named("h"))).json == no_arguments


def test_a_forced_call_has_the_arguments_that_the_schema_names():
    inner = {"type": "object", "properties": {"c": {"enum": [{"properties": {}}]}}}
    free = [{"type": "object"}, {"additionalProperties": {"type": "integer"}}, {"properties": {}, "anyOf": [{}]}]
    free += [{"properties": {}, "required": ["more"]}, {"properties": {}, "minProperties": 2}]
    schema = {
        "properties": {"a": {"items": inner}, "b": {"anyOf": free}, "d": {"$ref": "#/$defs/i"}},
        "$defs": {"i": inner},
    }
    shut = inner | {"additionalProperties": False}
    found = tool_choice_structure(*request([tool(parameters=schema)], named())).json
    assert found == {
        "type": "object", "additionalProperties": False, "$defs": {"i": shut},
        "properties": {"a": {"items": shut}, "b": {"anyOf": free}, "d": {"$ref": "#/$defs/i"}},
    }  # fmt: skip
    for open_one in (schema | {"additionalProperties": True}, {"properties": {"allOf": {"allOf": [inner, inner]}}}):
        found = tool_choice_structure(*request([tool(parameters=open_one)], named())).json
        assert found.get("additionalProperties", True) is True


CALL = {"name": "tree", "parameters": {"value": 1, "left": {"value": 2}}}


@pytest.mark.parametrize(
    ("output", "parallel", "is_right"),
    [
        ([CALL], True, True),
        ([CALL], False, True),
        ([CALL, {"name": "g", "parameters": {"any": [1]}}], True, True),
        ([CALL, CALL], False, False),
        ([], True, False),
        ([{"name": "tree", "parameters": {"value": "one"}}], True, False),
        ([{"name": "tree", "parameters": {"value": 1, "left": {}}}], True, False),
        ([{"name": "g"}], True, False),
        ([{"name": "h", "parameters": {}}], True, False),
        (CALL, True, False),
    ],
)
def test_required_forces_calls_of_the_tools(output, parallel, is_right, accepts):
    given = request([tool("tree", parameters=TREE), tool("g", parameters={})], "required")
    assert forced_tools(*given) == ForcedTools()
    assert tool_choice_structure(given[0], "any", parallel) == tool_choice_structure(*given, parallel)
    structure = tool_choice_structure(*given, parallel)
    assert Draft202012Validator(structure.json).is_valid(output) == is_right
    assert accepts(library_grammar(structure), json.dumps(output)) == is_right


def test_forced_json_has_no_room_for_endless_space(accepts):
    grammar = library_grammar(tool_choice_structure(*request([tool(parameters={})], named())))
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, '{"a":1}')
    assert not accepts(grammar, '{"a":  1}')


@pytest.fixture(scope="module")
def accepts():
    """Whether a grammar, as the library takes it, has this text as a sentence."""
    from llguidance import LLMatcher, LLTokenizer

    from quire.config.args import EngineArgs
    from quire.config.checkpoint.location import EMBEDDED_CHECKPOINTS
    from quire.text.tokenizer.tokenizer import Tokenizer

    config = EngineArgs(model=EMBEDDED_CHECKPOINTS[0]).resolve()
    tokenizer = LLTokenizer(Tokenizer.from_path(config.model.tokenizer_path).to_json())

    def accepts(grammar, text):
        matcher = LLMatcher(tokenizer, grammar)
        assert not matcher.get_error()
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepts
