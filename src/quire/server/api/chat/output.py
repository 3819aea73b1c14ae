"""Converts the model's output in a chat to events: content, reasoning and tool calls."""

import dataclasses
from collections.abc import Callable

from msgspec.structs import replace

from quire.common.outputs import CompletionOutput, RequestOutput
from quire.engine.requests.drafted_text import DraftedText
from quire.server.api.chat import events as chat
from quire.server.api.chat.prompt import content_text
from quire.server.api.chat.protocol import ChatCompletionRequest
from quire.server.api.shared.fields import Timings
from quire.server.api.shared.generation import chat_logprobs, prompt_logprobs
from quire.server.api.shared.sampling import content_format, structure
from quire.server.api.tools.choice import (
    allowed_tools,
    calls_or_content,
    check_tools,
    forced_tools,
    tool_choice_structure,
)
from quire.server.api.tools.formats import shows_special_tokens
from quire.server.api.tools.output_parser import OutputParser
from quire.server.api.tools.schemas import argument_schemas
from quire.server.http.errors import invalid
from quire.server.models.served_model import ServedModel
from quire.text.tokenizer.token_decoder import TextStream


class ChatPlan:
    """How a request's tools and formats determine its grammar and the parsing of its output. Raises RequestError."""

    def __init__(self, model: ServedModel, request: ChatCompletionRequest) -> None:
        check_tools(request.tools, request.tool_choice)
        tools, choice = allowed_tools(request.tools, request.tool_choice)
        parallel = request.parallel_tool_calls is not False
        self.shown_tools = None if choice == "none" else tools
        self.forced = forced_tools(tools, choice)
        form = structure(request)
        special = {text: i for i, text in model.llm.tokenizer.special_token_texts.items()}
        self.structured_outputs = tool_choice_structure(tools, choice, parallel) or form
        # The content's format may come along: an output of forced calls has no content.
        if self.forced is not None and form is not None and content_format(request) is None:
            raise invalid(
                "a tool_choice that forces calls cannot be combined with another constraint on the output",
                "tool_choice",
            )
        self.is_named = self.forced is not None and self.forced.name is not None
        self.max_calls = None if parallel else 1
        is_free = form is None and self.forced is None  # a grammar does not permit tags
        self.tools = model.tool_format if self.shown_tools and self.forced is None else None
        if form is not None and tools and self.tools is not None:
            has_both = content_format(request) is not None and form.structural_tag is None
            if has_both:
                self.structured_outputs = calls_or_content(tools, form, self.tools, special, parallel)
            self.tools = dataclasses.replace(self.tools, excludes_content=True) if has_both else None
        self.schemas = argument_schemas(tools or ())
        self.reasoning = model.reasoning_format if is_free else None
        self.shows_special_tokens = shows_special_tokens(self.reasoning, self.tools, special)


class ChatChoices:
    """Converts the engine's outputs to events, with one parser for each choice."""

    def __init__(
        self,
        plan: ChatPlan,
        request: ChatCompletionRequest,
        prompt: str,
        stream: Callable[[], TextStream],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        """`stream` makes one that turns a choice's tokens into text, `token_bytes` returns the UTF-8 of a token."""
        self._plan = plan
        self._stream = stream if request.mark_drafts else None
        self._token_bytes = token_bytes
        self._drafted: dict[int, DraftedText] = {}
        self._request = request
        self._reasoning = plan.reasoning and plan.reasoning.after(prompt)
        self._parsers: dict[int, OutputParser] = {}
        self._callers: set[int] = set()
        last = request.messages[-1]
        self._echoed = content_text(last.content) if request.echo and last.role == "assistant" else ""
        self._has_sent_prompt = not request.return_token_ids and request.prompt_logprobs is None

    def events(self, output: RequestOutput, timings: Timings | None) -> list[chat.ChatEvent]:
        """The events of this output; `timings` is attached to the last one."""
        found: list[chat.ChatEvent] = []
        if not self._has_sent_prompt:
            self._has_sent_prompt = True
            token_ids = output.prompt_token_ids if self._request.return_token_ids else None
            logprobs = prompt_logprobs(output.prompt_logprobs) if self._request.prompt_logprobs is not None else None
            found.append(chat.PromptEvent(token_ids, logprobs))
        for delta in output.outputs:
            found += self._of_choice(delta, timings if delta is output.outputs[-1] else None)
        return found

    def _of_choice(self, delta: CompletionOutput, timings: Timings | None) -> list[chat.ChatEvent]:
        index, is_first = delta.index, delta.index not in self._parsers
        if is_first:
            self._parsers[index] = self._new_parser(index)
        parser = self._parsers[index]
        parsed = parser.feed(delta.text) if self._stream is None else self._marked(parser, delta, self._stream)
        if delta.finish_reason is not None:
            parsed += parser.finish()
        if any(isinstance(part, chat.ToolCallDelta) for part in parsed):
            self._callers.add(index)
        hides_reasoning = self._request.include_reasoning is False
        found: list[chat.ChatEvent] = [
            p for p in parsed if not (hides_reasoning and isinstance(p, chat.ReasoningDelta))
        ]
        if is_first and self._echoed:
            found.insert(0, chat.ContentDelta(index, self._echoed))
        self._attach_tokens(found, delta)
        if delta.finish_reason is not None:
            found.append(chat.ChoiceFinished(index, self._finish_reason(delta), delta.stop_reason, timings))
        return found

    def _marked(
        self, parser: OutputParser, delta: CompletionOutput, stream: Callable[[], TextStream]
    ) -> list[chat.ChoiceEvent]:
        """The events of a delta, of which those of drafts are marked."""
        if delta.index not in self._drafted:
            self._drafted[delta.index] = DraftedText(stream())
        divided = self._drafted[delta.index].divide(delta.text, delta.token_ids, delta.accepted_drafts)
        return [
            replace(event, drafted=is_draft) if isinstance(event, chat.ContentDelta | chat.ReasoningDelta) else event
            for text, is_draft in divided
            for event in parser.feed(text)
        ]

    def _new_parser(self, index: int) -> OutputParser:
        plan = self._plan
        return OutputParser(index, reasoning=self._reasoning, tools=plan.tools, forced=plan.forced,
                            schemas=plan.schemas, max_calls=plan.max_calls)  # fmt: skip

    def _attach_tokens(self, found: list[chat.ChatEvent], delta: CompletionOutput) -> None:
        """Attach token ids and log-probabilities to the first content event, or to an additional empty one."""
        request = self._request
        token_ids = delta.token_ids if request.return_token_ids else None
        logprobs = None
        if request.logprobs and delta.logprobs is not None:
            as_ids = bool(request.return_tokens_as_token_ids)
            num_top = request.top_logprobs or 0
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs, num_top, as_ids, self._token_bytes)
        if not token_ids and not logprobs:
            return
        for i, event in enumerate(found):
            if isinstance(event, chat.ContentDelta):
                found[i] = replace(event, logprobs=logprobs, token_ids=token_ids)
                return
        found.append(chat.ContentDelta(delta.index, "", logprobs, token_ids))

    def _finish_reason(self, delta: CompletionOutput) -> chat.ChatFinishReason:
        """OpenAI's finish reason: `stop` for a function that the request named, since the model did not choose it."""
        if delta.finish_reason == "length":
            return "length"
        return "tool_calls" if delta.index in self._callers and not self._plan.is_named else "stop"
