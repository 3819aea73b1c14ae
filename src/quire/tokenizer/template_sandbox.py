"""The Jinja environment chat templates run in: no way out of it, and no way to run or grow without end.

Templates come with checkpoints, so from strangers. Jinja's sandbox keeps them from Python's internals and from changing
their inputs. On top of it, rendering has a budget of operations and characters.

Covered: loops, nested and recursive ones too; calls of macros, methods and functions; `range` (at most 100,000); the
operators `+ * ** % ~`; padding and formatting to a great width; everything printed, also inside macros and `{% set %}`
blocks. Not covered: a filter or `str` of a list that holds one large text many times over.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OPERATIONS = 500_000
"""loop steps and calls of one rendering: about a second, at most a few"""
MAX_TEXT_CHARS = 16_000_000
"""of any one text, the finished prompt included"""
MAX_PRINTED_CHARS = 64_000_000
"""printed in all, in macros and blocks too"""
MAX_COPIED_CHARS = 1_000_000_000
"""built by operators in all: about a second"""
MAX_WIDTH = 10_000
"""to pad or indent to"""

_PADDING_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs"}
_WIDE_FIELD = re.compile(r"(\{[^{}]*|%[-+ #.\d]*)(\d{5,})|\{[^{}]+\{|%[-+ #.\d]*\*")
"""a field of a format whose width has five digits or more, or is computed"""


@dataclass(slots=True)
class _Budget:
    operations: int = MAX_OPERATIONS
    printed_chars: int = MAX_PRINTED_CHARS
    copied_chars: int = MAX_COPIED_CHARS

    def spend(self, operations: int = 1, printed: int = 0, copied: int = 0) -> None:
        self.operations -= operations
        self.printed_chars -= printed
        self.copied_chars -= copied
        if min(self.operations, self.printed_chars, self.copied_chars) < 0:
            raise SecurityError("it runs without end or makes too much text")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


def compile_template(source: str) -> jinja2.Template:
    """Parse, put the counters in, compile. Raises jinja2.TemplateSyntaxError."""
    tree = _ENVIRONMENT.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(cast(nodes.Expr, loop.iter), "counted")
    for output in list(tree.find_all(nodes.Output)):
        output.nodes = [_filtered(_constant(node), "charged") for node in output.nodes]
    _replace_concats(tree)
    tree.set_environment(_ENVIRONMENT)
    code = _ENVIRONMENT.compile(tree, "chat template", "<chat template>")
    return jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The template's text, within the budget; SecurityError beyond it."""
    token = _budget.set(_Budget())
    try:
        pieces, num_chars = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            _check_size(num_chars)
        return "".join(pieces)
    finally:
        _budget.reset(token)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_size(max(_length(left) * _count(right), _length(right) * _count(left), _num_digits(left, right)))
        elif operator == "**":
            _check_size(_num_digits(left) * abs(right) if isinstance(right, int) else 0)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        result = super().call_binop(context, operator, left, right)
        _check_size(_length(result))
        _budget.get().spend(copied=_length(result))
        return result

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        if isinstance(obj, LoopContext) and args:
            args = (_counted(context, args[0]), *args[1:])
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = _check_text_method(owner, method.__name__, args)
        return super().call(context, obj, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only encloses text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _constant(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


def _replace_concats(node: nodes.Node) -> None:
    """`a ~ b` becomes a filter of the list of both, which looks at their lengths before it joins them."""
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, nodes.Node):
                _replace_concats(child)
        replaced = [
            _filtered(nodes.List(child.nodes, lineno=child.lineno), "concatenated")
            if isinstance(child, nodes.Concat)
            else child
            for child in children
        ]
        setattr(node, field, replaced if isinstance(value, list) else replaced[0])


@jinja2.pass_context  # these take the context only so that they are never run at compile time
def _counted(_: Any, values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.spend()
        yield value


@jinja2.pass_context
def _charged(_: Any, value: Any) -> str:
    text = str(value)
    _budget.get().spend(printed=len(text))
    return text


@jinja2.pass_context
def _concatenated(_: Any, values: list[Any]) -> str:
    texts = [str(value) for value in values]
    num_chars = sum(map(len, texts))
    _check_size(num_chars)
    _budget.get().spend(copied=num_chars)
    return "".join(texts)


def _bounded_join(values: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = (jinja2.filters.make_attrgetter(_ENVIRONMENT, attribute)(value) for value in values)
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)) + len(str(d)) * len(texts))
    return str(d).join(texts)


def _bounded_replace(s: Any, old: str, new: str, count: int = -1) -> str:
    text = str(s)
    _check_size(len(text) + text.count(old) * len(new))
    return text.replace(old, new, count)


def _bounded_indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    width = len(width) if isinstance(width, str) else width
    _check_width(width)
    _check_size(len(s) + s.count("\n") * width)
    return jinja2.filters.do_indent(s, width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter would escape it for HTML."""
    _check_width(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_TEXT_CHARS:
        raise SecurityError(f"it makes a text of more than {MAX_TEXT_CHARS} characters")


def _check_text_method(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse a method of a text that would make a huge one. Returns the arguments, an iterator among them unrolled."""
    if name in _PADDING_METHODS:
        _check_width(*args)
    elif name in ("format", "format_map"):
        _check_format(text)
    elif name == "join" and args:
        parts = list(args[0])
        _check_size(sum(map(_length, parts)) + len(text) * len(parts))
        return (parts,)
    elif name == "replace" and len(args) >= 2:
        _check_size(len(text) + text.count(args[0]) * _length(args[1]))
    return args


def _check_width(*values: Any) -> None:
    if any(isinstance(value, int) and value > MAX_WIDTH for value in values):
        raise SecurityError(f"it pads text to more than {MAX_WIDTH} characters")


def _check_format(layout: str) -> None:
    if _WIDE_FIELD.search(layout):
        raise SecurityError("it formats text with a field of a huge or computed width")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _num_digits(*values: Any) -> int:
    return sum(value.bit_length() for value in values if isinstance(value, int))


def _make_environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    filters: dict[str, Callable[..., Any]] = {
        "counted": _counted,
        "charged": _charged,
        "concatenated": _concatenated,
        "join": _bounded_join,
        "replace": _bounded_replace,
        "indent": _bounded_indent,
        "tojson": _tojson,
    }
    environment.filters.update(filters)
    for name in ("center", "format", "wordwrap", "urlize", "xmlattr", "pprint"):  # amplify, and no prompt needs them
        del environment.filters[name]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _make_environment()
