"""The Jinja environment in which chat templates run, sandboxed and with limits on time and memory.

Templates come with checkpoints and are not trusted. Jinja's sandbox keeps them from Python's internals and from
changing their inputs. In addition, rendering has a budget of operations, characters and processor time, and no single
operation may take or produce values so large that the budget could not be checked in time (see budget.py).
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.text.chat_template import budget

MAX_TEMPLATE_CHARS = 128 * 1024
"""Length of a template's source. Compiling this much takes up to two seconds; the longest in use take 1 % of that."""
_MAX_LAYOUT_CHARS = 1000
_FILE_NAME = "<chat template>"
warnings.filterwarnings(
    "ignore", category=SyntaxWarning, module=_FILE_NAME
)  # warnings about a template's code do not belong in the log
_UNNEEDED = ("center", "format", "pprint", "striptags", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr")
"""Filters that are slow with long texts or make them much longer, and that no chat template needs."""
_UNSAFE_METHODS = frozenset(["encode", "maketrans", "to_bytes", "translate"])
"""Methods that return huge texts, or bytes, which the budget does not measure."""


def compile_template(source: str) -> jinja2.Template:
    """Parse a template, insert checks and compile it. Raises TemplateSyntaxError or an error of Python's compiler."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise jinja2.TemplateSyntaxError(f"it has {len(source):,} characters, more than {MAX_TEMPLATE_CHARS:,}", 1)
    tree = _ENVIRONMENT.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(cast(nodes.Expr, loop.iter), "counted")
    for output in list(tree.find_all(nodes.Output)):
        output.nodes = [_filtered(_constant(node), "charged") for node in output.nodes]
    _guard(tree)
    tree.set_environment(_ENVIRONMENT)
    code = _ENVIRONMENT.compile(tree, "chat template", _FILE_NAME)
    return jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render a template. Raises SecurityError if it exceeds the budget."""
    with budget.Budget():
        pieces, total = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            total += len(piece)
            budget.check_size(total)
        return "".join(pieces)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_type = isinstance(obj, type)  # methods of types could change their arguments
        return not is_type and attr not in _UNSAFE_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget.check_binary(operator, left, right)
        return budget.measured(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget.spend(1)
        if isinstance(obj, LoopContext) and args:
            args = (_counted(context, args[0]), *args[1:])
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join" and args:
                args = (list(args[0]),)
            budget.check_method(owner, method.__name__, [*args, *kwargs.values()])
        return budget.measured(super().call(context, obj, *args, **kwargs))


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _constant(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


def _guard(node: nodes.Node) -> None:
    """Insert filters around the operations that Jinja does not pass to the environment.

    These are lists, comparisons, slices, and `a ~ b`, which becomes a filter that checks the lengths before it joins.
    """
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, nodes.Node):
                _guard(child)
        guarded = [_guarded(child) for child in children]
        setattr(node, field, guarded if isinstance(value, list) else guarded[0])


def _guarded(node: Any) -> Any:
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "concatenated")
    is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
    is_made = is_slice or isinstance(node, nodes.Compare | nodes.List | nodes.Tuple | nodes.Dict)
    return _filtered(node, "measured") if is_made and not is_target else node


@jinja2.pass_context  # these take the context only so that they are never run at compile time
def _counted(_: Any, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        budget.spend(1)
        yield value


@jinja2.pass_context
def _charged(_: Any, value: Any) -> str:
    text = budget.text_of(value)
    budget.spend(printed=len(text))
    return text


@jinja2.pass_context
def _concatenated(_: Any, values: list[Any]) -> str:
    return _join(values, "")


@jinja2.pass_context
def _measured(_: Any, value: Any) -> Any:
    return budget.measured(value)


def _join(values: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = (jinja2.filters.make_attrgetter(_ENVIRONMENT, attribute)(value) for value in values)
    return _joined(map(budget.text_of, values), str(d))


def _joined(pieces: Iterable[str], between: str = "") -> str:
    """Join texts, checking the total length before."""
    texts, total = [], 0
    for piece in pieces:
        budget.spend()
        total += len(piece) + len(between)
        budget.check_size(total)
        texts.append(piece)
    return between.join(texts)


def _replace(s: Any, old: str, new: str, count: int = -1) -> str:
    text = budget.text_of(s)
    budget.check_method(text, "replace", [old, new])
    return text.replace(old, new, count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    width = len(width) if isinstance(width, str) else width
    budget.check_width([width])
    budget.check_size(len(s) + s.count("\n") * width)
    return jinja2.filters.do_indent(s, width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; Jinja's own filter would escape it for HTML."""
    budget.check_width([indent])
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return encoder.encode(value) if indent is None and separators is None else _joined(encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > _MAX_LAYOUT_CHARS:
        raise SecurityError(f"it formats a date with more than {_MAX_LAYOUT_CHARS} characters")
    return datetime.now().strftime(layout)


def _check_texts(value: Any, others: list[Any]) -> None:
    for text in (value, *others):
        budget.num_chars(text)


def _check_short(value: Any, others: list[Any]) -> None:
    budget.check_items(budget.num_chars(value))


def _check_list(value: Any, others: list[Any]) -> None:
    budget.check_items(budget.num_items(value))


def _check_narrow(value: Any, others: list[Any]) -> None:
    budget.check_items(budget.num_items(value))
    budget.check_width(others)


def _check_numbers(value: Any, others: list[Any]) -> None:
    budget.check_items(budget.num_items(value))
    if any(isinstance(other, list | tuple) for other in others):
        raise SecurityError("it adds up lists")


def _check_nothing(value: Any, others: list[Any]) -> None:
    """Allow a filter that takes no time."""


_Check = Callable[[Any, list[Any]], None]
_CHECKS: dict[str, _Check] = dict.fromkeys(
    ("abs", "attr", "count", "d", "default", "filesizeformat", "first", "float", "int", "last", "length", "random"),
    _check_nothing,
)
_CHECKS |= dict.fromkeys(
    ("capitalize", "e", "escape", "forceescape", "indent", "join", "lower", "replace", "safe", "string", "tojson",
     "trim", "truncate", "upper"), _check_texts,
)  # fmt: skip
_CHECKS |= dict.fromkeys(("batch", "round", "slice"), _check_narrow)
_CHECKS |= {"sum": _check_numbers, "title": _check_short}
"""The check of each filter's arguments. Filters not listed here process a list, and are checked by _check_list."""


def _bounded(function: Callable[..., Any], check: _Check) -> Callable[..., Any]:
    """Wrap a filter or test with its checks. Without a budget, at compile time, it fails, so Jinja calls it later."""
    num_own = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget.spend()
        check(args[num_own], [*args[num_own + 1 :], *kwargs.values()])
        return budget.measured(function(*args, **kwargs))

    return bounded


def _make_environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    for name in _UNNEEDED:
        del environment.filters[name]
    environment.filters |= {"indent": _indent, "join": _join, "replace": _replace, "tojson": _tojson}
    function: Any
    for name, function in environment.filters.items():
        environment.filters[name] = _bounded(function, _CHECKS.get(name, _check_list))
    for name, function in environment.tests.items():
        environment.tests[name] = _bounded(function, _check_nothing)
    own = {"charged": _charged, "concatenated": _concatenated, "counted": _counted, "measured": _measured}
    environment.filters.update(own)
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _make_environment()
