"""Structural tags: JSON that describes an output of free text and structured parts.

The names are those of xgrammar's structural tags, which vLLM uses, and of the older form with `structures` and
`triggers`. Only the formats and options of this module are supported; others are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, get_args

import msgspec

from quire.common.errors import InvalidParamsError

MAX_TRIGGERS = 128
MAX_TAGS = 1024
"""Of one `triggered_tags`: each tag is compared with each trigger."""
_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_Off: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=0)]
"""An option that is accepted where it is empty."""


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(_Struct, frozen=True, tag="const_string"):
    """Exactly this text."""

    value: str


class JsonSchema(_Struct, frozen=True, tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: dict[str, Any]
    style: Annotated[str, msgspec.Meta(pattern="^json$")] = "json"
    any_order: bool = False
    """Accepted without effect: properties come in the schema's order, which this option allows, too."""


class Regex(_Struct, frozen=True, tag="regex"):
    """A match of a regular expression."""

    pattern: _Text


class AnyText(_Struct, frozen=True, tag="any_text"):
    """Any text, up to the end of the output or of the tag around it."""

    excludes: _Off = []
    max_tokens: None = None
    max_chars: None = None


class Token(_Struct, frozen=True, tag="token"):
    """One token, by its id."""

    token: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Sequence(_Struct, frozen=True, tag="sequence"):
    """One format after the other."""

    elements: Annotated[list[Format], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        if any(map(_is_endless, self.elements[:-1])):
            raise ValueError("any_text and triggered_tags must be the last of a sequence, or the content of a tag")


class Or(_Struct, frozen=True, tag="or"):
    """One of several formats."""

    elements: Annotated[list[Format], msgspec.Meta(min_length=1)]


class Tag(_Struct, frozen=True, tag="tag"):
    """A format between a beginning and an end, or one of several ends."""

    begin: str | Token
    content: Format
    end: str | Token | Annotated[list[str], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        if _is_endless(self.content) and (not isinstance(self.content, AnyText) or not self.end):
            raise ValueError("the content of a tag must not be endless, except any_text with an end that is not empty")


class TriggeredTags(_Struct, frozen=True, tag="triggered_tags"):
    """Free text in which a trigger forces one of the tags that begin with it."""

    triggers: Annotated[list[_Text], msgspec.Meta(min_length=1, max_length=MAX_TRIGGERS)]
    tags: Annotated[list[Tag], msgspec.Meta(min_length=1, max_length=MAX_TAGS)]
    at_least_one: bool = False
    """Whether the output begins with a tag."""
    stop_after_first: bool = False
    """Whether the output ends after a tag."""
    excludes: _Off = []

    def __post_init__(self) -> None:
        for i, tag in enumerate(self.tags):
            begin = tag.begin
            if sum(isinstance(begin, str) and begin.startswith(trigger) for trigger in self.triggers) != 1:
                raise ValueError(f"tags[{i}].begin must begin with exactly one of the triggers")


class TagsWithSeparator(_Struct, frozen=True, tag="tags_with_separator"):
    """Nothing but tags with a text between them."""

    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format: TypeAlias = (
    ConstString | JsonSchema | Regex | AnyText | Token | Sequence | Or | Tag | TriggeredTags | TagsWithSeparator
)


class _Whole(_Struct, frozen=True, tag="structural_tag"):
    format: Format


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any]
    end: str


class _OldForm(_Struct, frozen=True, tag="structural_tag"):
    structures: list[_Structure]
    triggers: list[str]


def read_structural_tag(given: str | dict[str, Any]) -> Format:
    """Return the format that a structural tag, in its old or new form, describes. Raises InvalidParamsError."""
    try:
        value = msgspec.json.decode(given, type=dict[str, Any]) if isinstance(given, str) else given
        if "format" in value:
            return msgspec.convert(value, _Whole).format
        old = msgspec.convert(value, _OldForm)
        tags = [{"begin": s.begin, "content": JsonSchema(s.schema), "end": s.end} for s in old.structures]
        return msgspec.convert({"triggers": old.triggers, "tags": tags}, TriggeredTags)
    except (msgspec.DecodeError, RecursionError) as error:
        names = ", ".join(str(kind.__struct_config__.tag) for kind in get_args(Format))
        raise InvalidParamsError(
            f"structural_tag is refused: {error}; give either 'format', of the types {names}, or 'structures' (begin, "
            "schema, end) with 'triggers'"
        ) from None


def _is_endless(form: Format) -> bool:
    """Whether only what surrounds the format can end it."""
    match form:
        case AnyText() | TriggeredTags():
            return True
        case Or():
            return any(map(_is_endless, form.elements))
        case Sequence():
            return _is_endless(form.elements[-1])
        case _:
            return False
