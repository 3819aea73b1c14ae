"""Parameters for structured output: the structure that an output must have."""

from typing import Any, ClassVar

import msgspec

from quire.common.arguments.vllm_arguments import Kind
from quire.common.errors import InvalidParamsError
from quire.common.params.base import NamesChecked
from quire.common.params.checks import refuse
from quire.common.params.structural_tag import read_structural_tag

MAX_BYTES = {"json": 256 * 1024, "regex": 64 * 1024, "choice": 256 * 1024, "grammar": 64 * 1024, "json_object": 4,
             "structural_tag": 512 * 1024}  # fmt: skip
"""Largest size of each structure, in bytes of UTF-8."""
MAX_GBNF_BYTES = 16 * 1024
"""Largest size of a GBNF grammar (`::=` rules), which is first translated in time quadratic in its size."""
MAX_CHOICES = 10_000
MAX_WHITESPACE_PATTERN_BYTES = 256
_TYPES: dict[str, tuple[type, ...]] = {
    "json": (str, dict),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "json_object": (bool,),
    "structural_tag": (str, dict),
}
_ALLOWED = {str: "a non-empty string", dict: "a dict", list: "a non-empty list", bool: "True or False"}
_OF_JSON = ("json", "json_object", "structural_tag")
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


class StructuredOutputsParams(
    msgspec.Struct, metaclass=NamesChecked, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The structure that an output must have; exactly one is given. Names are those of vLLM.

    The constructor raises InvalidParamsError for none or several structures, for malformed JSON, for options that
    belong to another structure, and for sizes above the limits of this module. Errors that only the compiler finds (a
    schema's keywords, a regular expression's syntax) end the request later.
    """

    kind: ClassVar[Kind] = "structured"

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression that the whole output matches, without look-around and back-references."""
    choice: list[str] | None = None
    """Strings, one of which is the output."""
    grammar: str | None = None
    """A context-free grammar in GBNF (`root ::= ...`) or Lark (`start: ...`)."""
    json_object: bool | None = None
    """True for any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with structured parts in it, as JSON; `quire.common.params.structural_tag` defines the formats."""
    disable_any_whitespace: bool = False
    """If True, the JSON has no spaces and line breaks between its tokens."""
    disable_additional_properties: bool = False
    """If True, objects with named properties have no other properties, unless their schema allows them."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the tokens of the JSON. None: a space, or a line break and up to
    16 spaces or 4 tabs. Where it has no bound, a model can write whitespace until the output is full."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise InvalidParamsError(
                f"structured_outputs has {' and '.join(given) or 'no structure'}: give exactly one of "
                f"{', '.join(_TYPES)}"
            )
        name, value = given[0], getattr(self, given[0])
        if not isinstance(value, _TYPES[name]) or value == "" or value == []:
            raise refuse(name, value, " or ".join(_ALLOWED[t] for t in _TYPES[name]))
        if name == "choice":
            self._check_choice()
        is_gbnf = self.grammar is not None and "::=" in self.grammar
        _check_bytes(name, value, MAX_GBNF_BYTES if is_gbnf else MAX_BYTES[name])
        if name == "json":
            self._check_schema()
        if self.structural_tag is not None:
            read_structural_tag(self.structural_tag)
        self._check_json_options(name)

    @property
    def structure(self) -> str:
        """Name of the field that is set."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in _TYPES if getattr(self, name) is not None and getattr(self, name) is not False]

    def _check_choice(self) -> None:
        assert self.choice is not None
        if len(self.choice) > MAX_CHOICES:
            raise InvalidParamsError(f"choice has {len(self.choice):,} strings: at most {MAX_CHOICES:,} are allowed")
        if not all(isinstance(s, str) and s for s in self.choice):
            raise InvalidParamsError("choice must be a list of non-empty strings")

    def _check_schema(self) -> None:
        try:
            schema = msgspec.json.decode(self.json) if isinstance(self.json, str) else self.json
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidParamsError(f"json is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise InvalidParamsError(f"json must be a JSON schema, an object, not {type(schema).__name__}")

    def _check_json_options(self, name: str) -> None:
        for option in _JSON_OPTIONS:
            value, wanted = getattr(self, option), str if option == "whitespace_pattern" else bool
            if value is None and wanted is str:
                continue
            if not isinstance(value, wanted) or value == "":
                raise InvalidParamsError(f"{option}={value!r}: must be a {wanted.__name__}")
            if value and name not in _OF_JSON:
                raise InvalidParamsError(f"{option} can be used with {' or '.join(_OF_JSON)}, not with {name}")
        if self.whitespace_pattern is not None:
            _check_bytes("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE_PATTERN_BYTES)
            if self.disable_any_whitespace:
                raise InvalidParamsError("give disable_any_whitespace or whitespace_pattern, not both")


def _check_bytes(name: str, value: Any, limit: int) -> None:
    """Raise InvalidParamsError if the value, as UTF-8 text or JSON, is longer than `limit` or cannot be encoded."""
    try:
        num_bytes = len(value.encode() if isinstance(value, str) else msgspec.json.encode(value))
    except UnicodeEncodeError:
        raise InvalidParamsError(f"{name} has surrogates, which are not valid Unicode text") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParamsError(f"{name} cannot be written as JSON: {error}") from None
    if num_bytes > limit:
        raise InvalidParamsError(f"{name} has {num_bytes:,} bytes: at most {limit:,} are allowed")
