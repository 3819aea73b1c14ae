"""Grammars are tried out in a process of their own first: the library cannot be interrupted, but a process can.

Its limits do not hold everywhere: intersections of regular expressions (`allOf` of patterns, many `patternProperties`,
`multipleOf`) may take it for ever. What has gone well there, and in time, is compiled in the engine's process.
"""

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from quire.common import liveness
from quire.common.errors import InvalidParamsError
from quire.common.faults import fault_point, fault_write
from quire.common.params import StructuredOutputsParams
from quire.text.grammar.source import library_grammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

TRIAL_LIMIT_S = 5
"""of processor time, so that a busy machine does not refuse what is well"""
TRIAL_LIMIT_BYTES = 2 * 1024**3
"""of address space"""
_PATIENCE_S = 60.0
"""of the clock: nothing should take so long"""
MAX_LEXER_STATES = 10_000
"""about 1 kB each, and every sequence may come to have its own"""
_MAX_STEP_ITEMS = 20_000
"""of the parser in one step: about 20 ms"""


class TrialSettings(msgspec.Struct):
    """What a trial has to know of the tokenizer; for text it has single bytes, which is faster to set up."""

    num_tokens: int
    special_tokens: Mapping[int, str]
    limit_s: int = TRIAL_LIMIT_S


class Verdict(msgspec.Struct):
    """What came of a trial: one of the two."""

    grammar: str = ""
    """in the library's words"""
    error: str = ""


class TrialProcess:
    """A child that waits for grammars to try; started when the first comes, and again after it had to be killed.

    One thread at a time uses it. It ends with this object, or with the process that owns it.
    """

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., TrialProcess] | None = None

    def check(self, params: StructuredOutputsParams) -> str:
        """The grammar in the library's words. Raises InvalidParamsError for one that is wrong or over the limits.

        Where somebody else has killed the child, which may have been for want of memory, another one tries once more.
        """
        answer, was_killed = self._ask(params)
        if was_killed:
            answer, _ = self._ask(params)
        if not answer:
            raise InvalidParamsError(
                f"{params.structure} is not taken: to compile it takes more than {self._settings.limit_s} s or "
                f"{TRIAL_LIMIT_BYTES // 1024**2:,} MiB; make it simpler"
            )
        verdict = msgspec.json.decode(answer, type=Verdict)
        if verdict.error:
            raise InvalidParamsError(f"{params.structure} is not taken: {verdict.error}")
        return verdict.grammar

    def _ask(self, params: StructuredOutputsParams) -> tuple[bytes, bool]:
        """The child's answer; none if it has ended, and then, whether somebody else has killed it."""
        if self._child is not None and self._child.poll() is not None:
            self.close()  # it has ended since, and that says nothing of this grammar
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        timer = threading.Timer(_PATIENCE_S, child.kill)
        timer.start()
        start_s = time.monotonic()
        try:
            fault_write("trial.send", child.stdin.write, msgspec.json.encode(params) + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            fault_point("trial.receive")
        except BrokenPipeError:
            answer = b""
        except BaseException:
            self.close()  # it may be in the middle of a line
            raise
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return answer, False
        self.close()
        return b"", child.returncode == -signal.SIGKILL and time.monotonic() < start_s + _PATIENCE_S

    def close(self) -> None:
        """End the child."""
        if self._end is not None:
            self._end()
        self._child = self._end = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        command = [sys.executable, "-c", "from quire.text.grammar.trial import serve; serve()"]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._end = weakref.finalize(self, _end_child, self._child)
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        return self._child


def _end_child(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()  # closes the pipes and waits


class _ByteTokenizer:
    """What the library asks of a tokenizer: special tokens in their places, single bytes in others, an end at last."""

    bos_token_id = None

    def __init__(self, settings: TrialSettings) -> None:
        special = settings.special_tokens
        self.eos_token_id = max(settings.num_tokens, 256 + len(special))
        self.special_token_ids = [*special, self.eos_token_id]
        self._byte_ids = list(islice((i for i in range(self.eos_token_id) if i not in special), 256))
        self.tokens = [b""] * self.eos_token_id + [b"<the end>"]
        for token_id, text in special.items():
            self.tokens[token_id] = text.encode()
        for byte, token_id in enumerate(self._byte_ids):
            self.tokens[token_id] = bytes([byte])

    def __call__(self, text: bytes) -> list[int]:
        return [self._byte_ids[byte] for byte in text]


def serve() -> None:
    """The child: a line with the settings, then a line of params in, one with the verdict out, until there are no
    more."""
    liveness.end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_LIMIT_BYTES, TRIAL_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)  # steps come first
    from llguidance import LLTokenizer, TokenizerWrapper

    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrialSettings)
    tokenizer = LLTokenizer(TokenizerWrapper(_ByteTokenizer(settings)))
    for line in sys.stdin.buffer:
        end_s = math.ceil(time.process_time() + settings.limit_s)
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))  # the signal that follows ends it
        sys.stdout.buffer.write(msgspec.json.encode(_try(tokenizer, line)) + b"\n")
        sys.stdout.buffer.flush()


def _try(tokenizer: "LLTokenizer", line: bytes) -> Verdict:
    from llguidance import LLMatcher

    try:
        grammar = library_grammar(msgspec.json.decode(line, type=StructuredOutputsParams))
    except (ValueError, RecursionError) as error:
        return Verdict(error=reason(str(error)))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
        for token_id in matcher.compute_ff_tokens():  # some show only there that they are too large
            if not matcher.consume_token(token_id):
                break
    return Verdict(grammar, reason(matcher.get_error()))


def parser_limits() -> "LLParserLimits":
    """What a grammar may take of the library, when it is compiled and in a step."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_max_items=_MAX_STEP_ITEMS, verbose_errors=False)


def reason(message: str) -> str:
    """The gist of a message of the library: before it stands the source, after it on new lines a trace."""
    return message.strip().rpartition("error: ")[2].split("\n")[0][:300]
