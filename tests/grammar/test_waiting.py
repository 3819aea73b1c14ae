"""Requests that wait for their grammars: nobody else does, and whatever happens to them happens to them alone."""

from concurrent.futures import Future

import msgspec
import pytest
from msgspec.structs import replace

from quire import LLM, InvalidParamsError, RequestError, SamplingParams
from quire.common.outputs import RequestMetrics
from quire.engine.process.messages import Progress
from quire.engine.requests import grammar_queue
from quire.text.grammar.compiler import Compilation, GrammarCompiler
from tests.grammar.masked_engine import MaskedExecutor, masked_llm, run, structured, wait_for_grammars

FREE = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class HeldCompiler:
    """Compilations end when the test says so."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self.held: list[tuple[Future, object, bool]] = []

    def submit(self, params: object, tenant: str = "", *, jumps: bool = True) -> Compilation:
        future: Future = Future()
        self.held.append((future, params, jumps))
        return future

    def release(self) -> None:
        future, params, jumps = self.held.pop(0)
        if future.set_running_or_notify_cancel():
            future.set_result(self.compiler._compile(params, 1, jumps))


class NeverRuns:
    """Threads that are busy for ever."""

    def submit(self, *_: object) -> Future:
        return Future()


@pytest.fixture
def held(monkeypatch) -> tuple[LLM, MaskedExecutor, HeldCompiler]:
    monkeypatch.setattr("quire.engine.llm_engine._GRAMMAR_WAIT_S", 0.0)
    llm, executor = masked_llm()
    compiler = llm.engine.grammars.compiler = HeldCompiler(llm.engine.grammars.compiler)
    return llm, executor, compiler


def test_others_go_on_while_a_grammar_is_compiled(held) -> None:
    llm, _, compiler = held
    llm.engine.add_request("waits", "a", structured(choice=["yes"]))
    llm.engine.add_request("runs", "a", FREE)
    assert llm.engine.stats().num_waiting == 2
    assert [group.request_id for group in llm.engine.grammars.queued(5)] == ["waits"]
    for _ in range(10):
        outputs = llm.engine.step()
        assert all(output.request_id == "runs" for output in outputs)
    assert llm.engine.has_unfinished_requests()
    assert not llm.engine.requests
    compiler.release()
    assert run(llm)["waits"].outputs[0].text == "yes"
    assert llm.engine.stats().num_waiting == 0


def test_a_step_with_nothing_else_to_do_waits(monkeypatch) -> None:
    wait_for_grammars(monkeypatch)
    llm, executor = masked_llm()
    llm.engine.add_request("x", "a", structured(choice=["yes"]))
    assert run(llm)["x"].outputs[0].text == "yes"
    assert executor.num_steps < 10  # it would be thousands if steps turned idle


def test_aborted_while_it_waits(held) -> None:
    llm, _, compiler = held
    llm.engine.add_request("x", "a", structured(choice=["yes"]))
    llm.engine.step()
    output = llm.engine.abort_request("x")
    assert output.outputs[0].finish_reason == "abort"
    assert not llm.engine.has_unfinished_requests()
    compiler.release()
    assert llm.engine.step() == []
    llm.engine.add_request("x", "a", FREE)  # the name is free again


def test_grammars_of_aborted_requests_are_not_compiled(held) -> None:
    llm, _, compiler = held
    for request_id in "ab":
        llm.engine.add_request(request_id, "a", structured(choice=["yes"]))
    a, b = compiler.held
    llm.engine.abort_request("a")
    assert a[0].cancelled()
    assert not b[0].cancelled()


def test_grammars_that_take_too_much_memory_together_are_compiled_one_after_another(held, monkeypatch) -> None:
    llm, _, compiler = held
    large, small = structured(choice=["yes" * 40]), structured(choice=["no"])
    sizes = [len(msgspec.json.encode(params.structured_outputs)) for params in (large, small)]
    monkeypatch.setattr(grammar_queue, "MAX_BYTES_IN_USE", sum(sizes))
    for request_id, params in (("a", large), ("b", large), ("left", large), ("c", small)):
        llm.engine.add_request(request_id, "a", params)
    assert len(compiler.held) == 2, "the first, and the one that fits beside it"
    assert [group.request_id for group in llm.engine.grammars.queued(9)] == ["a", "c", "b", "left"]
    assert llm.engine.stats().num_waiting == 4
    llm.engine.abort_request("left")
    compiler.release()
    while "a" in llm.engine._groups:
        assert len(compiler.held) == 1, "the first still runs"
        llm.engine.step()
    llm.engine.step()
    assert len(compiler.held) == 2
    compiler.release()
    compiler.release()
    outputs = run(llm)
    assert {name: output.outputs[0].text for name, output in outputs.items()} == {"b": "yes" * 40, "c": "no"}
    assert not llm.engine.grammars._in_use


def test_grammars_are_taken_from_the_tenant_with_the_least_in_use(held, monkeypatch) -> None:
    """However many one tenant has sent before, and however small, another's is next."""
    llm = held[0]
    small, large = ["yes"], ["yes" * 10]
    sizes = [len(msgspec.json.encode(structured(choice=choice).structured_outputs)) for choice in (small, large)]
    monkeypatch.setattr(grammar_queue, "MAX_BYTES_IN_USE", 2 * sizes[0])
    assert sizes[0] < sizes[1] <= 2 * sizes[0]

    def add(request_id: str, tenant: str, choice: list[str]) -> None:
        llm.engine.add_request(request_id, "a", replace(structured(choice=choice), tenant=tenant))

    def begun() -> list[str]:
        return [group.request_id for group in llm.engine.grammars._waiting]

    for number in range(5):
        add(f"mine {number}", "alice", small)
    add("theirs", "bob", large)
    assert begun() == ["mine 0", "mine 1"]
    llm.engine.abort_request("mine 0")
    llm.engine.step()
    assert begun() == ["mine 1"], "the memory is kept for the other tenant's grammar, which does not fit yet"
    llm.engine.abort_request("mine 1")
    llm.engine.step()
    assert begun() == ["theirs"]
    llm.engine.abort_request("theirs")
    llm.engine.step()
    assert begun() == ["mine 2", "mine 3"]
    for request_id in ("mine 2", "mine 3", "mine 4"):
        llm.engine.abort_request(request_id)
    assert not llm.engine.grammars._in_use
    llm.engine.scheduler.blocks.check_integrity()


def test_an_abandoned_grammar_is_compiled_when_it_is_requested_again() -> None:
    llm, _ = masked_llm()
    compiler, params = llm.engine.grammars.compiler, structured(choice=["yes"])
    threads, compiler._threads = compiler._threads, NeverRuns()
    llm.engine.add_request("x", "a", params)
    llm.engine.abort_request("x")
    compiler._threads = threads
    assert llm.generate("a", params, use_tqdm=False)[0].outputs[0].text == "yes"


def test_a_grammar_that_takes_too_long(held, monkeypatch) -> None:
    llm, _, compiler = held
    now = [0.0]
    llm.engine.grammars.clock = lambda: now[0]
    llm.engine.add_request("slow", "a", structured(choice=["yes"]))
    llm.engine.add_request("other", "a", FREE)
    llm.engine.step()
    now[0] = 10 * grammar_queue.COMPILE_LIMIT_S  # the wait for other grammars does not count
    llm.engine.step()
    assert llm.engine.stats().num_waiting == 1
    compiler.held[0][0].set_running_or_notify_cancel()
    llm.engine.step()
    now[0] += grammar_queue.COMPILE_LIMIT_S + 1
    outputs = run(llm)
    assert outputs["slow"].outputs[0].finish_reason == "ignored"
    assert "not compiled within 20 s" in outputs["slow"].error
    assert outputs["other"].outputs[0].finish_reason == "length"


def test_a_failed_compilation_ends_its_request_alone() -> None:
    llm, _ = masked_llm()
    prompts, params = ["a"] * 3, [FREE, structured(regex="(a"), structured(choice=["yes"])]
    free, wrong, right = llm.generate(prompts, params, use_tqdm=False)
    assert (wrong.outputs[0].finish_reason, wrong.outputs[0].token_ids) == ("ignored", [])
    assert wrong.error == "regex is rejected: unclosed group"
    assert len(free.outputs[0].token_ids) == 4
    assert right.outputs[0].text == "yes"
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate("a", params[1], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_a_failure_is_reported_once_the_step_succeeds(held) -> None:
    llm, executor, compiler = held
    llm.engine.add_request("x", "a", structured(choice=["yes"]))
    future, *_ = compiler.held.pop()
    future.set_exception(InvalidParamsError("planted"))
    executor.num_failures = 1
    assert llm.engine.step() == []
    assert llm.engine.has_unfinished_requests()
    (output,) = llm.engine.step()
    assert (output.request_id, output.error) == ("x", "planted")
    assert not llm.engine.has_unfinished_requests()


def test_aborted_after_a_failure_that_was_not_reported(held) -> None:
    llm, executor, compiler = held
    llm.engine.add_request("x", "a", structured(choice=["yes"]))
    compiler.held.pop()[0].set_exception(KeyError("planted"))
    executor.num_failures = 1
    assert llm.engine.step() == []
    assert "KeyError" in llm.engine.abort_request("x").error
    assert llm.engine.step() == []


def test_a_known_grammar_starts_at_once(monkeypatch) -> None:
    wait_for_grammars(monkeypatch)
    llm, executor = masked_llm()
    params = structured(choice=["yes"], max_tokens=1)
    llm.generate("a", params, use_tqdm=False)
    executor.num_steps = 0
    llm.engine.add_request("x", "a", params)
    llm.engine.step()
    assert executor.token_counts[-1] > 0
    assert not llm.engine.has_unfinished_requests()


def test_without_grammars_the_library_is_not_loaded() -> None:
    llm, _ = masked_llm(share_compiler=False)
    llm.generate("a", FREE, use_tqdm=False)
    assert llm.engine.grammars.compiler._vocabulary is None
    llm.engine.grammars.compiler.prepare()
    assert llm.engine.grammars.compiler._vocabulary is not None


def test_a_request_with_a_past_goes_on_in_the_middle_of_its_grammar() -> None:
    llm, _ = masked_llm()
    params = structured(regex="[a-f]{12}[0-9]{3}", temperature=1.0)
    alone = llm.generate("a", params, use_tqdm=False)[0].outputs[0]
    progress = Progress(RequestMetrics(0.0), 0, alone.token_ids[:5])
    llm.engine.add_request("x", "a", params, progress=progress)
    rest = run(llm)["x"].outputs[0]
    assert rest.text == alone.text.removeprefix(llm.engine.tokenizer.decode(progress.token_ids)) != alone.text


def test_a_grammar_that_cannot_begin_ends_its_request_alone(held) -> None:
    llm, _, compiler = held
    llm.engine.add_request("x", "a", structured(choice=["yes"]))
    llm.engine.add_request("other", "a", FREE)
    compiler.held.pop()[0].set_exception(KeyError("planted"))
    outputs = run(llm)
    assert outputs["x"].outputs[0].finish_reason == "abort"
    assert outputs["x"].error == "request 'x' failed when its grammar was compiled: KeyError"
    assert outputs["other"].outputs[0].finish_reason == "length"
