"""Steps that are executed while the outputs of the one before are made."""

import random
import threading

import pytest

from quire import LLM, SamplingParams

PATIENCE_S = 60


def make_llm(**arguments) -> LLM:
    return LLM(max_model_len=64, **({"num_gpu_blocks_override": 12} | arguments))


def stream(step, engine, between=lambda: None) -> dict[str, list[str]]:
    """The deltas of each request, in order."""
    deltas: dict[str, list[str]] = {}
    while engine.has_unfinished_requests():
        for output in step():
            deltas.setdefault(output.request_id, []).extend(sample.text for sample in output.outputs)
        engine.blocks.check_integrity()
        between()
    assert engine.blocks.num_used_blocks == 0
    return deltas


def add(engine, request_id, **params) -> None:
    rng = random.Random(request_id)
    how = {"seed": 3, "max_tokens": 12, "output_kind": "delta", "ignore_eos": True} | params
    engine.add_request(request_id, [rng.randrange(3, 8192) for _ in range(rng.randint(1, 40))], SamplingParams(**how))


@pytest.mark.parametrize("params", [{}, {"stop": ["e"]}, {"n": 3}, {"logprobs": 2}])
def test_what_comes_out_is_the_same(params):
    streams = []
    for name in ("step", "step_ahead"):
        engine = make_llm().engine
        for i in range(8):
            add(engine, str(i), **params)
        streams.append(stream(getattr(engine, name), engine))
    assert streams[0] == streams[1]


def test_the_next_step_runs_while_outputs_are_handled():
    """It is held until the caller has the outputs: a step that did not run ahead would never return."""
    engine, handled = make_llm().engine, threading.Event()
    execute, steps = engine.executor.execute, []

    def wait_and_execute(batch):
        steps.append(batch.step)
        assert len(steps) == 1 or handled.wait(PATIENCE_S)
        return execute(batch)

    engine.executor.execute = wait_and_execute
    add(engine, "a")
    (first,) = engine.step_ahead()
    assert len(first.outputs[0].token_ids) == 1
    handled.set()
    (second,) = engine.step()
    assert steps == [1, 2]
    assert len(second.outputs[0].token_ids) == 1
    stream(engine.step, engine)


def test_requests_come_and_go_while_a_step_runs():
    engine = make_llm().engine
    expected = {}
    for i in range(6):
        add(engine, str(i))
        expected |= stream(engine.step, engine)
    for i in range(3):
        add(engine, str(i))
    add(engine, "aborted", max_tokens=50)
    later = [3, 4, 5]

    def between():
        if later:
            add(engine, str(later.pop()))
        elif (output := engine.abort_request("aborted")) is not None:
            assert output.outputs[0].finish_reason == "abort"

    deltas = stream(engine.step_ahead, engine, between)
    deltas.pop("aborted")
    assert {name: "".join(texts) for name, texts in deltas.items()} == {
        name: "".join(texts) for name, texts in expected.items()
    }


def test_a_step_that_runs_for_nobody_any_more_is_ended():
    """What it was to copy stays held until then."""
    engine = make_llm().engine
    add(engine, "a")
    engine.step_ahead()
    engine.abort_request("a")
    assert engine.has_unfinished_requests()
    assert engine.step_ahead() == []
    assert not engine.has_unfinished_requests()


def test_a_step_that_fails_is_tried_again():
    engine = make_llm().engine
    add(engine, "a")
    expected = stream(engine.step, engine)
    execute, fails = engine.executor.execute, [3, 6]

    def fail_sometimes(batch):
        if fails and batch.step - first_step >= fails[0]:
            fails.pop(0)
            raise RuntimeError("planted")
        return execute(batch)

    first_step = engine.scheduler.num_steps
    engine.executor.execute = fail_sometimes
    add(engine, "a")
    assert stream(engine.step_ahead, engine) == expected
    assert fails == []
