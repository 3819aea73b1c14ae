"""Talk with a model, turn by turn; each answer is printed while it is generated.

/help lists the commands. A line below each answer shows its speed and how many prompt tokens came from the prefix
cache, and with --speculate how many drafts were accepted; on a terminal their text is coloured.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from typing import TYPE_CHECKING

from quire.cli.arguments.options import (
    add_engine_arguments,
    add_lora_argument,
    add_model_argument,
    add_sampling_arguments,
    load_llm_and_adapter,
    sampling_options,
    sampling_params,
)
from quire.cli.terminal.text import without_controls
from quire.common.errors import RequestError, nearest_name
from quire.engine.requests.drafted_text import DraftedText
from quire.engine.step.interrupts import interrupt_deferred

if TYPE_CHECKING:
    from quire.common.outputs import RequestOutput
    from quire.common.params import SamplingParams
    from quire.engine.adapters import AnyAdapter
    from quire.interfaces.llm import LLM


_COMMANDS = {
    "/reset": "clear the conversation, except for the system message",
    "/exit": "quit, as Ctrl-D does",
    "/help": "list these commands",
    "Ctrl-C": "stop an answer and keep the text so far",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning of the conversation")
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="show what came from accepted drafts; --speculative-config chooses them (default here: method suffix)",
    )
    add_lora_argument(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Load the model, then read and answer messages until the input ends."""
    given = sampling_options(options)
    if options.speculate:
        options.speculative_config = getattr(options, "speculative_config", {"method": "suffix"})
    llm, lora = load_llm_and_adapter(options)
    session = ChatSession(llm, sampling_params(given, llm), options.system, lora, shows_drafts=options.speculate)
    interactive, num_refused = sys.stdin.isatty(), 0
    if interactive:
        import readline  # noqa: F401  importing it makes input() editable

        print("/help lists the commands")
    while True:
        try:
            message = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            break
        except KeyboardInterrupt:
            print()
            continue
        if message == "/exit":
            break
        if message == "/reset":
            session.reset()
        elif re.fullmatch(r"/[a-z?]*", message):
            if message not in ("/help", "/?"):
                print(f"there is no {message}{nearest_name(message, _COMMANDS)}")
            print("\n".join(f"{name:<8} {text}" for name, text in _COMMANDS.items()))
        elif message:
            try:
                num_refused += not session.answer(message)
            except KeyboardInterrupt:
                print()
    return int(num_refused > 0 and not interactive)


class ChatSession:
    """One conversation with a model, printed as it is generated."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        lora: AnyAdapter = None,
        *,
        shows_drafts: bool = False,
    ) -> None:
        self._llm = llm
        self._lora_request = lora
        self._params = params
        self._system = system
        self._shows_drafts = shows_drafts
        self._num_turns = 0
        self.reset()

    def reset(self) -> None:
        """Clear the conversation, except for the system message."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, message: str) -> bool:
        """Send a message to the model and print the answer. False if the message is refused, and dropped."""
        messages = [*self.messages, {"role": "user", "content": message}]
        start = time.monotonic()
        try:
            output = self._stream(messages)
        except RequestError as error:
            print(f"{error} (/reset starts a new conversation)", file=sys.stderr)
            return False
        if output is not None and (text := output.outputs[0].text):
            # the template expects an answer after each message, so a message without one is dropped
            self.messages = [*messages, {"role": "assistant", "content": text}]
        print()
        if output is not None:
            print(_styled("2", _summary(output, time.monotonic() - start, shows_drafts=self._shows_drafts)))
        return True

    def _stream(self, messages: list[dict[str, str]]) -> RequestOutput | None:
        """Run the request and print its text as it is generated. Ctrl-C ends it; None if there is no output by then."""
        engine = self._llm.engine
        self._num_turns += 1
        request_id = f"chat-{self._num_turns}"
        output: RequestOutput | None = None
        num_printed = num_divided = 0
        try:
            prompt = self._llm.chat_prompt(messages)
            drafted = DraftedText(engine.tokenizer.stream(prompt["prompt_token_ids"]))
            engine.add_request(request_id, prompt, self._params, lora_request=self._lora_request)
            while output is None or not output.finished:
                with interrupt_deferred():
                    for output in engine.step():
                        answer = output.outputs[0]
                        drafts = [p - num_divided for p in answer.accepted_drafts if p >= num_divided]
                        added = without_controls(answer.text[num_printed:])
                        parts = drafted.divide(added, answer.token_ids[num_divided:], drafts)
                        shown = [_styled("32", text) if self._shows_drafts and mark else text for text, mark in parts]
                        print("".join(shown), end="", flush=True)
                        num_printed, num_divided = len(answer.text), len(answer.token_ids)
        except KeyboardInterrupt:
            return engine.abort_request(request_id) or output
        if output.error is not None:
            raise RequestError(output.error)
        return output


def _summary(output: RequestOutput, elapsed_s: float, *, shows_drafts: bool) -> str:
    num_tokens, drafts = len(output.outputs[0].token_ids), ""
    if shows_drafts and output.metrics is not None:
        num_drafts, num_accepted = output.metrics.num_drafts
        drafts = f", {num_accepted} of {num_drafts} drafts accepted"
    return (
        f"[{num_tokens} tokens, {num_tokens / elapsed_s:.1f} tokens/s, "
        f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the prefix cache{drafts}]"
    )


def _styled(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text
