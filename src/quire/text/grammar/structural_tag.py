"""Conversion of structural tags to the grammar library's dialect of Lark."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.common.params import structural_tag as tags


class LarkRules:
    """The rules of one grammar. Expressions that its methods return may refer to rules made before."""

    def __init__(self, json: Callable[[Any], str], regex: Callable[[str], str]) -> None:
        """`json` and `regex` return the expression for a schema and for a regular expression."""
        self._json = json
        self._regex = regex
        self._rules = ["ANY: /(.|\\n)*/"]

    def grammar(self, form: tags.Format) -> str:
        """Return the grammar of an output in this format."""
        return "\n".join([f"start: {self._of(form)}", *self._rules])

    def _of(self, form: tags.Format) -> str:
        match form:
            case tags.ConstString():
                return _text(form.value)
            case tags.JsonSchema():
                return self._json(form.json_schema)
            case tags.Regex():
                return self._regex(form.pattern)
            case tags.AnyText():
                return "ANY"
            case tags.Token():
                return f"<[{form.token}]>"
            case tags.Sequence():
                return " ".join(map(self._of, form.elements))
            case tags.Or():
                return _one_of(map(self._of, form.elements))
            case tags.Tag():
                return self._tag(form, "")
            case tags.TriggeredTags():
                return self._triggered(form)
            case tags.TagsWithSeparator():
                tag = self._rule(_one_of(self._tag(tag, "") for tag in form.tags))
                several = tag if form.stop_after_first else f"{tag} ({_text(form.separator)} {tag})*"
                return several if form.at_least_one else f"({several})?"

    def _tag(self, tag: tags.Tag, trigger: str) -> str:
        """Return the expression for a tag whose trigger has been generated."""
        begin = self._of(tag.begin) if isinstance(tag.begin, tags.Token) else _text(tag.begin.removeprefix(trigger))
        if isinstance(tag.end, tags.Token):
            end = self._of(tag.end)
        else:
            end = _one_of(map(_text, [tag.end] if isinstance(tag.end, str) else tag.end))
            if isinstance(tag.content, tags.AnyText):
                return f"{begin} {self._rule(f'ANY {end}', is_lazy=True)}"
        return f"{begin} {self._of(tag.content)} {end}"

    def _triggered(self, form: tags.TriggeredTags) -> str:
        """Text up to a trigger is lazy, so that the trigger cannot be a part of free text."""
        whole, behind_text = [], []
        for trigger in form.triggers:
            found = [tag for tag in form.tags if isinstance(tag.begin, str) and tag.begin.startswith(trigger)]
            if found:
                rest = self._rule(_one_of(self._tag(tag, trigger) for tag in found))
                whole.append(f"{_text(trigger)} {rest}")
                behind_text.append(f"{self._rule(f'ANY {_text(trigger)}', is_lazy=True)} {rest}")
        if form.stop_after_first:
            return _one_of(whole if form.at_least_one else [*behind_text, "ANY"])
        return f"{_one_of(whole) if form.at_least_one else ''} {_one_of(behind_text)}* ANY"

    def _rule(self, expression: str, *, is_lazy: bool = False) -> str:
        """Make a rule and return its name."""
        self._rules.append(f"r{len(self._rules)}{'[lazy]' if is_lazy else ''}: {expression}")
        return f"r{len(self._rules) - 1}"


def _one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def _text(value: str) -> str:
    """Return a literal, which has the syntax of JSON."""
    return msgspec.json.encode(value).decode()
