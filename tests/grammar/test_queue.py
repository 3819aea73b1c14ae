"""The queue of grammars by itself, with a compiler whose compilations begin and end when the test says so."""

from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for

import msgspec
import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.common.batch import Draw
from quire.common.errors import InvalidParamsError
from quire.engine.requests import grammar_queue
from quire.engine.requests.grammar_queue import COMPILE_LIMIT_S, GrammarQueue
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.text.grammar.compiler import Compilation


class Grammar:
    """Remembers the tokens that it has seen; `forbidden` raises."""

    def __init__(self, forbidden: int | None = None) -> None:
        self.token_ids: list[int] = []
        self.forbidden = forbidden

    def advance(self, token_id: int) -> bool:
        if token_id == self.forbidden:
            raise KeyError(token_id)
        self.token_ids.append(token_id)
        return True


class Unfinished(Future):
    """A future whose result is not waited for."""

    def result(self, timeout: float | None = None) -> object:
        return super().result(0)


class Compiler:
    """Keeps what is submitted, with the future that the test completes."""

    def __init__(self) -> None:
        self.submitted: list[tuple[StructuredOutputsParams, str, bool]] = []
        self.futures: list[Future] = []

    def submit(self, params: StructuredOutputsParams, tenant: str = "", *, jumps: bool = True) -> Compilation:
        self.submitted.append((params, tenant, jumps))
        self.futures.append(Unfinished())
        return self.futures[-1]

    @property
    def choices(self) -> list[str]:
        """What was submitted, by the first text that it allows."""
        return [params.choice[0] for params, _, _ in self.submitted]


class Requests(list):
    """Those that were added to the scheduler."""

    add = list.append


class Queue(GrammarQueue):
    """A grammar queue that is at second `now`."""

    def __init__(self) -> None:
        super().__init__(Compiler(), lambda: self.now)
        self.now = 100.0
        self.requests = Requests()

    def ready(self) -> list[SequenceGroup]:
        """The requests that are added to the scheduler now."""
        self.requests.clear()
        self.admit(self.requests)
        return list(self.requests)

    def end(self, group: SequenceGroup) -> list[SequenceGroup]:
        """A waiting request ends. Returns what is ready then."""
        assert self.remove(group)
        self.forget(group)
        return self.ready()

    def knows(self, group: SequenceGroup) -> bool:
        """Whether anything is kept of a request."""
        return any(group in kept for kept in vars(self).values() if isinstance(kept, list | dict))


PLAIN = Draw(1.0, 0, 1.0, b"")


def request(choice: str = "yes", tenant: str = "", *, draw: Draw = PLAIN, history: tuple[int, ...] = ()):
    """A request with one choice, which gives it its name. `history`: the tokens that another engine has generated."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=[choice]), tenant=tenant)
    seq = Sequence(0, [1, 2, 3], (draw,), SampleOutput(params))
    seq.extend(history)
    return SequenceGroup(OutputBuilder(choice, seq.token_ids, params, 0.0), seq)


def num_bytes(group: SequenceGroup) -> int:
    return len(msgspec.json.encode(group.params.structured_outputs))


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def serial(queue, monkeypatch) -> Queue:
    """A queue in which each grammar takes all the memory."""
    monkeypatch.setattr(grammar_queue, "MAX_BYTES_IN_USE", 0)
    return queue


def test_a_new_grammar_is_compiled_at_once_for_its_tenant(queue):
    group = request("yes", "alice")
    queue.add(group)
    assert queue.compiler.submitted == [(group.params.structured_outputs, "alice", True)]


@pytest.mark.parametrize(
    ("change", "jumps"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": ((4, 1.0),)}, True),
        ({"logprobs": 0}, False),
        ({"allowed_token_ids": (4, 5)}, False),
        ({"bad_words": ((4, 5),)}, False),
        ({"processors": ("one",)}, False),
        ({"min_tokens": 1, "stop_token_ids": (0,)}, False),
    ],
)
def test_forced_tokens_are_appended_without_a_draw_only_where_nothing_else_depends_on_it(queue, change, jumps):
    queue.add(request(draw=msgspec.structs.replace(PLAIN, **change)))
    assert [jumping for _, _, jumping in queue.compiler.submitted] == [jumps]


def test_requests_become_ready_when_their_grammars_are(queue):
    groups = [request(choice) for choice in "abc"]
    for group in groups:
        queue.add(group)
    assert queue.queued(9) == groups
    assert queue.queued(2) == groups[:2]
    assert queue.ready() == []
    grammars = [Grammar(), Grammar()]
    for future, grammar in zip(queue.compiler.futures[1:], grammars, strict=True):
        future.set_result(grammar)
    assert queue.ready() == groups[1:]
    assert [group.seqs[0].grammar for group in groups] == [None, *grammars]
    assert [(group.error, group.seqs[0].status) for group in groups] == [(None, SequenceStatus.WAITING)] * 3
    assert (len(queue), queue.queued(9), queue.ready()) == (1, groups[:1], [])


def test_a_grammar_continues_behind_the_tokens_that_another_engine_has_generated(queue):
    queue.add(request(history=(7, 8)))
    grammar = Grammar()
    queue.compiler.futures[0].set_result(grammar)
    (group,) = queue.ready()
    assert group.seqs[0].grammar is grammar
    assert grammar.token_ids == [7, 8]


@pytest.mark.parametrize("error", [None, InvalidParamsError("regex is rejected")])
def test_a_request_whose_grammar_fails_ends_and_is_reported_once(queue, error):
    """Either it is rejected, or it cannot be advanced to where the request is."""
    failing, fine = request("a", history=(7,)), request("b")
    for group in (failing, fine):
        queue.add(group)
    if error is None:
        queue.compiler.futures[0].set_result(Grammar(forbidden=7))
    else:
        queue.compiler.futures[0].set_exception(error)
    queue.compiler.futures[1].set_result(Grammar())
    assert queue.ready() == [fine], "those behind it are ready all the same"
    assert failing.metrics.finished_time == 100.0
    if error is None:
        assert failing.error == "request 'a' failed when its grammar was compiled: KeyError"
        assert failing.seqs[0].status is SequenceStatus.FINISHED_ABORTED
    else:
        assert failing.error == "regex is rejected"
        assert failing.seqs[0].status is SequenceStatus.FINISHED_IGNORED
    assert (len(queue), queue.queued(9)) == (1, [])
    assert queue.take_failed() == [failing]
    assert (len(queue), queue.take_failed()) == (0, [])


def test_the_time_limit_of_each_compilation_begins_with_it(queue):
    first, second = request("a"), request("b")
    for group in (first, second):
        queue.add(group)
    queue.now += 10 * COMPILE_LIMIT_S
    assert queue.ready() == [], "no thread has begun them"
    queue.compiler.futures[0].set_running_or_notify_cancel()
    queue.ready()
    queue.now += 1
    queue.compiler.futures[1].set_running_or_notify_cancel()
    queue.ready()
    queue.now += COMPILE_LIMIT_S - 1
    assert (queue.ready(), queue.take_failed()) == ([], []), "the first has taken exactly as long as it may"
    queue.now += 0.5
    assert (queue.ready(), queue.take_failed()) == ([], [first])
    assert first.error == f"the grammar was not compiled within {COMPILE_LIMIT_S:g} s: make it simpler"
    assert first.seqs[0].status is SequenceStatus.FINISHED_IGNORED
    assert first.metrics.finished_time == queue.now
    queue.now += 1
    assert (queue.ready(), queue.take_failed()) == ([], [second])
    for group in (first, second):
        queue.forget(group)
        assert not queue.knows(group)


@pytest.mark.parametrize("when", ["held", "compiling", "late", "failed"])
def test_nothing_is_kept_of_a_removed_request(serial, when):
    running, group = request("a"), request("b")
    if when == "held":
        serial.add(running)
    serial.add(group)
    if when == "late":
        serial.compiler.futures[0].set_running_or_notify_cancel()
    elif when == "failed":
        serial.compiler.futures[0].set_exception(InvalidParamsError("planted"))
    serial.ready()
    assert len(serial) == (2 if when == "held" else 1)
    assert serial.remove(group) is True
    assert serial.remove(group) is False
    assert len(serial) == (1 if when == "held" else 0)
    assert serial.compiler.futures[0].cancelled() is (when == "compiling")
    serial.forget(group)
    assert not serial.knows(group)
    assert serial.take_failed() == []


def test_requests_without_a_grammar_may_be_forgotten_too(queue):
    queue.forget(request())
    assert queue.remove(request()) is False


def test_a_step_waits_for_the_first_compilation(queue, monkeypatch):
    calls = []
    monkeypatch.setattr(grammar_queue, "wait_for", lambda *given: calls.append(given) or wait_for(given[0], 0))
    for choice in "ab":
        queue.add(request(choice))
    queue.wait(0.25)
    assert calls == [(queue.compiler.futures, 0.25, FIRST_COMPLETED)]


@pytest.mark.parametrize(("wait_s", "num_known", "waits"), [(0.25, 0, True), (0.25, 1, False), (0.0, 0, False)])
def test_it_waits_only_if_it_is_asked_to_and_nothing_else_runs(queue, monkeypatch, wait_s, num_known, waits):
    calls = []
    monkeypatch.setattr(queue, "wait", calls.append)
    queue.admit(Requests([request()] * num_known), wait_s)
    assert calls == [wait_s] * waits


def test_grammars_are_compiled_while_their_sources_fit_into_memory_together(queue, monkeypatch):
    groups = [request(choice) for choice in ("a" * 9, "b" * 20, "c" * 30, "d")]
    monkeypatch.setattr(grammar_queue, "MAX_BYTES_IN_USE", num_bytes(groups[0]) + num_bytes(groups[1]))
    for group in groups:
        queue.add(group)
    assert queue.compiler.choices == ["a" * 9, "b" * 20], "these two fill it exactly"
    assert (len(queue), queue.queued(9), queue.queued(3)) == (4, groups, groups[:3])
    queue.end(groups[0])
    assert queue.compiler.choices[2:] == ["d"], "the other one is larger than what has become free"
    queue.end(groups[1])
    assert queue.compiler.choices[3:] == [], "not even now"
    queue.end(groups[3])
    assert queue.compiler.choices[3:] == ["c" * 30], "a grammar alone may have any size"


def test_all_that_a_tenant_has_in_use_counts(queue, monkeypatch):
    running = [request("a" * 9, "alice"), request("b" * 9, "alice"), request("c" * 20, "bob"), request("d", "carol")]
    monkeypatch.setattr(grammar_queue, "MAX_BYTES_IN_USE", sum(map(num_bytes, running)))
    for group in (*running, request("e", "alice"), request("f", "bob")):
        queue.add(group)
    assert queue.compiler.choices == [group.params.structured_outputs.choice[0] for group in running]
    queue.end(running[-1])
    assert queue.compiler.choices[4:] == ["f"], "each grammar of alice's is smaller than bob's, but not both"


def test_what_a_tenant_is_given_counts_at_once(queue, monkeypatch):
    running = [request("a", "alice"), request("b" * 20, "bob"), request("c", "carol"), request("d", "carol")]
    monkeypatch.setattr(grammar_queue, "MAX_BYTES_IN_USE", sum(map(num_bytes, running)))
    for group in (*running, request("e", "alice"), request("f", "alice"), request("g", "bob")):
        queue.add(group)
    queue.remove(running[2])
    queue.forget(running[2])
    queue.end(running[3])
    assert queue.compiler.choices[4:] == ["e", "g"], "alice had less in use than bob, but has more with one of the two"


def test_tenants_that_use_as_little_take_turns(serial):
    """A tenant that was not served comes first, and those that have no more requests are forgotten."""
    names = ["a0", "a1", "a2", "b0", "b1", "c0"]
    groups = {name: request(name, tenant=name[0]) for name in names}
    for group in groups.values():
        serial.add(group)
    for num_begun in range(1, 7):
        assert len(serial.compiler.choices) == num_begun
        serial.end(groups[serial.compiler.choices[-1]])
    assert serial.compiler.choices == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert serial._served == ["a/", "a"]


def test_users_of_a_key_share_its_turns(serial):
    names = ["a/0", "a/1", "a/2", "b", "b/0"]
    groups = {name: request(name, tenant=name) for name in names}
    for group in groups.values():
        serial.add(group)
    for _ in names:
        serial.end(groups[serial.compiler.choices[-1]])
    assert serial.compiler.choices == ["a/0", "b", "a/1", "b/0", "a/2"]


class Unread(dict):
    """Knows what is asked for by key, and cannot be gone through."""

    def __iter__(self):
        raise AssertionError("a new request looks at all others")

    keys = values = items = __iter__


def test_a_new_grammar_takes_no_longer_however_many_are_in_use(queue):
    queue._in_use = Unread()
    groups = [request(choice, tenant) for choice, tenant in ("aa", "ba", "cb")]
    for group in groups:
        queue.add(group)
    assert (queue._num_in_use, len(queue._in_use_by)) == (sum(map(num_bytes, groups)), 2 * 2)
    for group in (*groups, *groups):
        queue.forget(group)
    assert (queue._num_in_use, queue._in_use_by) == (0, {})
