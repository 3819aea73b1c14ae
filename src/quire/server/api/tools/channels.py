"""Reads OpenAI's harmony format, in which gpt-oss writes: messages in channels, each with a header."""

from quire.server.api.tools.call_reader import CallReader
from quire.server.api.tools.json_text import SPACE
from quire.server.api.tools.parsed import ParsedList
from quire.server.api.tools.reader import Reader, Reading, Sink

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
FUNCTIONS = "functions."
"""Precedes the names of functions, where they are the recipients of messages."""
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_MAX_PARTS = 8
"""Parts of a header: its channel, its recipient, the type of its content."""


class ChannelReader:
    """Reads messages: `analysis` is reasoning, a message to a function is a call, everything else is content.

    Headers are left out, and messages of one kind are joined by a line break. A header that is malformed is content,
    and so is a message to a function whose text is not an object of JSON, with its header.
    """

    def __init__(self, calls: CallReader, found: ParsedList, *, has_reasoning: bool, has_calls: bool) -> None:
        """Without reasoning or calls, their messages are content, too."""
        self._calls = calls
        self._reader: Reader = calls.reader
        self._content: Sink = found.content
        self._reasoning: Sink = found.reasoning if has_reasoning else found.content
        self._has_calls = has_calls
        self._used: set[Sink] = set()

    def read(self, *, excludes_content: bool) -> Reading[None]:
        """Read all messages, of which the prompt has the first `<|start|>`. `excludes_content`: see ToolFormat."""
        tag = START
        while tag == START:
            header = yield from self._header()
            if header is not None:
                tag = yield from self._message(*header)
            self._content(self._reader.release())
            if header is None and excludes_content:
                return
            if tag != START or header is None:
                tag = yield from self._reader.until([START], self._content)
            self._reader.hold(START)

    def _header(self) -> Reading[tuple[str, str] | None]:
        """Read up to the end of a header, and return the channel and the recipient. None: it is malformed."""
        channel = recipient = ""
        yield from self._calls.marks("assistant")
        for _ in range(_MAX_PARTS):
            yield from self._reader.run(SPACE)
            if (yield from self._reader.match(MESSAGE)):
                return channel, recipient
            if (yield from self._reader.match(CHANNEL)):
                channel = yield from self._calls.name()
            elif (yield from self._reader.match("to=")):
                recipient = yield from self._calls.name()
            elif not (channel or recipient) or not (yield from self._content_type()):
                return None
        return None

    def _content_type(self) -> Reading[str]:
        yield from self._reader.match(CONSTRAIN)
        return (yield from self._calls.name())

    def _message(self, channel: str, recipient: str) -> Reading[str]:
        """Read the text of a message, and return what ends it: nothing at the end of the output."""
        sink = self._reasoning if channel == "analysis" else self._content
        if self._has_calls and recipient.startswith(FUNCTIONS):
            sink = self._content
            yield from self._calls.arguments_of(recipient.removeprefix(FUNCTIONS))
            sink(self._reader.release())
        else:
            self._reader.release()
            if sink in self._used:
                sink("\n")
            self._used.add(sink)
        return (yield from self._reader.until(_ENDS, sink))
