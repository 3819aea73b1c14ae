"""Parsing a text in given pieces, and putting the answer together as a client does."""

from dataclasses import dataclass, field
from itertools import count, pairwise

from quire.server.api.chat.events import ContentDelta, ReasoningDelta, ToolCallDelta
from quire.server.api.tools.output_parser import OutputParser


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """name and arguments"""
    ids: list[str] = field(default_factory=list)


def parse(pieces, **formats) -> Answer:
    """The folded answer; checks the promises about each piece."""
    numbers = count()
    parser = OutputParser(new_id=lambda: f"call_{next(numbers)}", **formats)
    return fold(parser, pieces, thinks_first=not getattr(formats.get("reasoning"), "has_channels", False))


def fold(parser: OutputParser, pieces, *, thinks_first: bool = True) -> Answer:
    """`thinks_first`: reasoning must come before content."""
    answer = Answer()
    for parsed in [*(p for piece in pieces for p in parser.feed(piece)), *parser.finish()]:
        if isinstance(parsed, ContentDelta):
            assert parsed.text
            answer.content += parsed.text
        elif isinstance(parsed, ReasoningDelta):
            assert parsed.text
            assert not answer.content or not thinks_first
            answer.reasoning += parsed.text
        else:
            _fold_call(answer, parsed)
    return answer


def _fold_call(answer: Answer, piece: ToolCallDelta) -> None:
    if piece.id is not None:
        assert piece.tool_index == len(answer.calls)
        answer.calls.append((piece.name, piece.arguments))
        answer.ids.append(piece.id)
        return
    assert piece.name is None
    assert piece.tool_index == len(answer.calls) - 1
    name, arguments = answer.calls[-1]
    answer.calls[-1] = (name, arguments + piece.arguments)


def cut(text: str, places) -> list[str]:
    """The text cut at these places."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]
