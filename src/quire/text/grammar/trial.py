"""Tests grammars in a separate process before the engine compiles them, because the library cannot be interrupted.

The library's own limits do not cover everything: intersections of regular expressions (`allOf` of patterns, many
`patternProperties`, `multipleOf`) may run forever. A grammar that passes the trial in time is then compiled in the
engine's process.
"""

import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
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
"""Limit of processor time, so that a grammar is not rejected because the machine is busy."""
TRIAL_LIMIT_BYTES = 2 * 1024**3
"""Limit of address space."""
_PATIENCE_S = 60.0
"""Limit of elapsed time, for a process that hangs."""
MAX_LEXER_STATES = 10_000
"""States of the lexer, about 1 kB each; every sequence may have its own."""
_MAX_STEP_ITEMS = 20_000
"""Items of the parser in one step, which take about 20 ms."""
_EXPLAINED = (
    (r"Unimplemented keys: \[(.*)\]", r"keywords of JSON schema that are not supported: \1; leave them out"),
    ("oneOf constraints are not .*", "oneOf is supported only for alternatives that exclude each other; use anyOf"),
)
"""(regular expression, replacement) for parts of the library's error messages."""


class TrialSettings(msgspec.Struct):
    """The settings of a trial process. Its tokenizer has special tokens and single bytes, which is fast to set up."""

    num_tokens: int
    special_tokens: Mapping[int, str]
    limit_s: int = TRIAL_LIMIT_S


class Verdict(msgspec.Struct):
    """The result of a trial: either a grammar or an error."""

    grammar: str = ""
    """The grammar in the library's format."""
    error: str = ""


class TrialProcess:
    """A child process that tests grammars. It is started with the first grammar, and again after it was killed.

    Only one thread at a time may use it. It ends with this object or with the process that owns it.
    """

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._end: liveness.Finalizer | None = None

    def check(self, params: StructuredOutputsParams) -> str:
        """Return the grammar in the library's format. Raises InvalidParamsError if it is invalid or over the limits.

        If the child was killed from outside, perhaps for lack of memory, the trial is repeated once in a new child.
        """
        answer, was_killed = self._ask(params)
        if was_killed:
            answer, _ = self._ask(params)
        if not answer:
            raise InvalidParamsError(
                f"{params.structure} is rejected: compiling it takes more than {self._settings.limit_s} s or "
                f"{TRIAL_LIMIT_BYTES // 1024**2:,} MiB; make it simpler"
            )
        verdict = msgspec.json.decode(answer, type=Verdict)
        if verdict.error:
            raise InvalidParamsError(f"{params.structure} is rejected: {verdict.error}")
        return verdict.grammar

    def _ask(self, params: StructuredOutputsParams) -> tuple[bytes, bool]:
        """Return the child's answer (empty if it ended instead) and whether it was killed from outside."""
        if self._child is not None and self._child.poll() is not None:
            self.close()  # it ended after the last trial, so not because of this grammar
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
            self.close()  # the child may have written a part of a line
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
        self._end = liveness.Finalizer(self, _end_child, self._child)
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        return self._child


def _end_child(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()  # closes the pipes and waits


class _ByteTokenizer:
    """The tokenizer of a trial: special tokens at their ids, single bytes at others, and an end-of-sequence token."""

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
    """Run the child process: read the settings, then answer each line of params with a line of the verdict."""
    liveness.end_with_parent()
    _limit(resource.RLIMIT_AS, TRIAL_LIMIT_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    os.nice(10)  # the engine's steps have priority
    from llguidance import LLTokenizer, TokenizerWrapper

    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrialSettings)
    tokenizer = LLTokenizer(TokenizerWrapper(_ByteTokenizer(settings)))
    with suppress(BrokenPipeError):  # the engine has been killed
        for line in sys.stdin.buffer:
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + settings.limit_s))  # SIGXCPU ends the process
            sys.stdout.buffer.write(msgspec.json.encode(_try(tokenizer, line)) + b"\n")
            sys.stdout.buffer.flush()


def _limit(kind: int, value: int) -> None:
    """Set a limit of this process, which may have a lower one already."""
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _try(tokenizer: "LLTokenizer", line: bytes) -> Verdict:
    from llguidance import LLMatcher

    try:
        grammar = library_grammar(msgspec.json.decode(line, type=StructuredOutputsParams))
    except (ValueError, RecursionError) as error:
        return Verdict(error=reason(str(error)))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
        for token_id in matcher.compute_ff_tokens():  # some grammars exceed the limits only here
            if not matcher.consume_token(token_id):
                break
    return Verdict(grammar, reason(matcher.get_error()))


def parser_limits() -> "LLParserLimits":
    """Return the limits of a grammar in the library, for compilation and for each step."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_max_items=_MAX_STEP_ITEMS, verbose_errors=False)


def reason(message: str) -> str:
    """Return the essential part of the library's error message, which has the source before it and a trace after it.
    Where it speaks of the library's own options, say what to do instead."""
    found = message.strip().rpartition("error: ")[2].split("\n")[0]
    for theirs, ours in _EXPLAINED:
        found = re.sub(theirs, ours, found)
    return found[:300]
