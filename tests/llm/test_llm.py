"""LLM: what goes in and comes out, in which order, and what is left behind when something goes wrong."""

import dataclasses
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.common.errors import (
    ConfigError,
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    RequestError,
    TokenizerError,
)
from quire.engine.step.interrupts import interrupt_deferred
from tests.scripted_engine import RecitingExecutor, recital, scripted_llm

GREEDY = SamplingParams(temperature=0, max_tokens=50)
USER = {"role": "user", "content": "Hi"}


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("prompt", ["one two", [5, 6, 7], {"prompt": "one two"}, {"prompt_token_ids": [5, 6, 7]}, (5,)])
def test_every_form_of_a_prompt_alone_and_in_a_list(llm: LLM, prompt: Any) -> None:
    for given in (prompt, [prompt]):
        (output,) = generate(llm, given)
        assert output.finished
        assert output.error is None
        assert output.outputs[0].text == recital(len(output.prompt_token_ids))
        assert output.outputs[0].finish_reason == "stop"
        assert llm.engine.tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    assert output.prompt == (text if isinstance(text, str) else None)


@pytest.mark.essential
def test_deltas_add_up_to_the_whole_and_report_each_end_once(llm: LLM) -> None:
    engine, whole = llm.engine, {}
    for kind in ("cumulative", "delta", "final_only"):
        params = SamplingParams(temperature=0, max_tokens=30, n=2, stop="seven", output_kind=kind)
        engine.add_request(kind, [5, 6, 7], params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all(output.prompt_token_ids == [5, 6, 7] for output in outputs)
        if kind == "final_only":
            assert len(outputs) == 1
        if kind != "delta":
            whole[kind] = [(o.text, o.token_ids, o.finish_reason) for o in outputs[-1].outputs]
            continue
        parts = [[o for output in outputs for o in output.outputs if o.index == index] for index in range(2)]
        assert all(len(part.token_ids) == 1 for sample in parts for part in sample)
        assert all(part.finish_reason is None for sample in parts for part in sample[:-1])
        whole[kind] = [
            ("".join(p.text for p in sample), [t for p in sample for t in p.token_ids], sample[-1].finish_reason)
            for sample in parts
        ]
    assert whole["delta"] == whole["cumulative"] == whole["final_only"]
    assert all(text for text, _, _ in whole["delta"])


@pytest.mark.parametrize("kind", ["delta", "final_only"])
def test_an_aborted_request_emits_what_was_not_emitted_yet(llm: LLM, kind: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, output_kind=kind)
    llm.engine.add_request("a", [5, 6, 7], params)
    told = [o for _ in range(4) for output in llm.engine.step() for o in output.outputs]
    last = llm.engine.abort_request("a")
    assert last is not None
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    tokens = [t for o in [*told, *last.outputs] for t in o.token_ids]
    assert len(tokens) == 4
    assert llm.engine.tokenizer.decode(tokens).startswith("".join(o.text for o in [*told, *last.outputs]))


@pytest.mark.essential
def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5] * n for n in (40, 3, 100, 1, 7)]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (30, 1, 9, 4, 30)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "length", "length", "length", "stop"]
    assert [len(o.outputs[0].token_ids) for o in outputs][1:4] == [1, 9, 4]
    assert len({output.request_id for output in outputs}) == len(prompts)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert generate(llm, []) == []


def test_without_params_the_checkpoint_recommends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine, "default_sampling_params", lambda: SamplingParams(max_tokens=2))
    assert len(generate(llm, "x", None)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("params", "message"),
    [([GREEDY] * 2, "2 sampling_params for 3 prompts"), ("hot", "not str"), ([GREEDY, None, GREEDY], "not NoneType")],
)
def test_wrong_params_are_refused_before_anything_runs(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        generate(llm, ["a", "b", "c"], params)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", InvalidPromptError),
        ([8192], InvalidPromptError),
        ([-1], InvalidPromptError),
        ([True, False], InvalidPromptError),
        ({"text": "x"}, InvalidPromptError),
        ({"prompt_token_ids": "abc"}, InvalidPromptError),
        (b"bytes", InvalidPromptError),
        ([5] * 256, PromptTooLongError),
        ("\ud800", InvalidPromptError),
    ],
)
def test_a_wrong_prompt_raises_alone_and_is_ignored_in_a_list(
    llm: LLM, prompt: Any, error: type[RequestError], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error) as raised:
        generate(llm, prompt)
    with caplog.at_level(logging.WARNING, logger="quire"):
        good, bad, also_good = generate(llm, ["good", prompt, "also good"])
    assert bad.finished
    assert bad.error == str(raised.value)
    assert bad.outputs[0].finish_reason == "ignored"
    assert (bad.outputs[0].text, bad.outputs[0].token_ids) == ("", [])
    assert [o.outputs[0].finish_reason for o in (good, also_good)] == ["stop", "stop"]
    assert f"prompt 1 was not run: {bad.error}" in caplog.text


@pytest.mark.parametrize("prompts", [5, None, iter(["a"])])
def test_an_input_other_than_a_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidPromptError, match="prompts must be a prompt"):
        generate(llm, prompts)


def test_a_prompt_that_can_never_fit_raises_alone_and_is_ignored_in_a_list() -> None:
    llm, _ = scripted_llm(num_gpu_blocks_override=2, max_model_len=32)
    inputs = llm.engine.inputs
    inputs.model = dataclasses.replace(inputs.model, max_model_len=999)  # what the plan would never allow
    good, bad = generate(llm, [[5] * 4, [5] * 100])
    assert good.outputs[0].finish_reason == "stop"
    assert bad.outputs[0].finish_reason == "ignored"
    with pytest.raises(RequestError, match=re.escape(bad.error)):
        generate(llm, [5] * 100)


def test_an_escaping_exception_aborts_the_requests_of_the_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", fail)
        with pytest.raises(RuntimeError, match="planted"):
            generate(llm, ["a", "b"])
    assert not llm.engine.has_unfinished_requests()
    assert generate(llm, "a")[0].outputs[0].finish_reason == "stop"


def test_ctrl_c_stops_between_steps_and_leaves_the_llm_usable(llm: LLM, executor: RecitingExecutor) -> None:
    begun, survived = [], []

    def interrupt(step: int) -> None:
        begun.append(step)
        if len(begun) == 3:
            signal.raise_signal(signal.SIGINT)
        survived.append(step)

    executor.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b"])
    assert len(begun) == len(survived) == 3, "the third step ran to its end, and no fourth began"
    assert not llm.engine.has_unfinished_requests()
    executor.before_step = lambda step: None
    assert generate(llm, "a")[0].outputs[0].finish_reason == "stop"


def test_a_second_ctrl_c_does_not_wait() -> None:
    reached = []

    @interrupt_deferred()
    def interrupted_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_are_left_alone_in_other_threads() -> None:
    seen = []

    def look() -> None:
        with interrupt_deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_chat_applies_the_template_and_adds_no_further_tokens(llm: LLM) -> None:
    (output,) = llm.chat([USER], GREEDY, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.engine.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert output.outputs[0].text == recital(len(output.prompt_token_ids))


def test_chat_with_many_conversations_and_options(llm: LLM) -> None:
    conversations = [[USER], [USER, {"role": "assistant", "content": "Well"}]]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert [output.prompt[-4:] for output in outputs] == ["r\nHi", "Well"]
    (output,) = llm.chat(
        [USER],
        GREEDY,
        use_tqdm=False,
        chat_template="{{ tools[0].name }} {{ mood }} {{ messages[0].content }}",
        tools=[{"name": "find"}],
        chat_template_kwargs={"mood": "calm"},
    )
    assert output.prompt == "find calm Hi"


def test_a_malformed_conversation_is_ignored_among_others_and_raises_alone(llm: LLM) -> None:
    good, bad = llm.chat([[USER], [{"content": "x"}]], GREEDY, use_tqdm=False)
    assert good.outputs[0].finish_reason == "stop"
    assert "messages[0] must be" in bad.error
    for wrong in ([], "Hi", [{"content": "x"}], 3):
        with pytest.raises(InvalidPromptError):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(TokenizerError, match="has only these chat templates"):
        llm.chat([USER], GREEDY, use_tqdm=False, chat_template="missing")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"max_model_length": 5}, "did you mean 'max_model_len'"), ({"max_num_seqs": "many"}, "max_num_seqs='many'")],
)
def test_wrong_arguments_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**kwargs)


def test_samples_of_one_prompt_come_as_one_request(llm: LLM) -> None:
    (output,) = llm.generate([[3] * 9], SamplingParams(n=3, temperature=0, max_tokens=4), use_tqdm=False)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert all(len(sample.token_ids) == 4 and sample.finish_reason == "length" for sample in output.outputs)
    assert len({id(sample.token_ids) for sample in output.outputs}) == 3
    with pytest.raises(InvalidParamsError, match=r"n=300.*max_num_seqs=256"):
        llm.generate([3], SamplingParams(n=300))


def test_names_and_arguments_of_vllm() -> None:
    from quire import AsyncEngineArgs
    from quire.engine.arg_utils import EngineArgs
    from quire.outputs import RequestOutput
    from quire.sampling_params import RequestOutputKind
    from quire.sampling_params import SamplingParams as Params

    assert AsyncEngineArgs is EngineArgs
    llm = LLM.from_engine_args(EngineArgs(model="quire-tiny", max_model_len=256, kv_cache_memory="4MiB"))
    assert llm.llm_engine is llm.engine
    assert llm.get_default_sampling_params() == llm.default_sampling_params()
    params = Params(max_tokens=2, output_kind=RequestOutputKind.DELTA)
    outputs = llm.generate(["a", "b"], params, lora_request=None, priority=[1, 0])
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert llm.chat([{"role": "user", "content": "a"}], params, chat_template_content_format="string")
    with pytest.raises(InvalidParamsError, match="1 priorities for 2 prompts"):
        llm.generate(["a", "b"], params, priority=[1])
    with pytest.raises(InvalidParamsError, match=r"priority=1\.5: must be"):
        llm.generate("a", params, priority=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidParamsError, match="lora_request must be a LoRARequest or None, not object"):
        llm.generate("a", params, lora_request=object())


def test_parameters_that_the_caller_changes_later_concern_later_requests_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    llm.engine.add_request("first", "a", params)
    params.max_tokens = 1
    while llm.engine.has_unfinished_requests():
        (output,) = llm.engine.step()
    assert len(output.outputs[0].token_ids) == 3


def test_an_end_outside_the_vocabulary_does_not_fail_requests_with_min_tokens() -> None:
    llm = LLM(override_generation_config={"eos_token_id": [8192, 9999]}, num_gpu_blocks_override=6, max_model_len=32)
    (output,) = generate(llm, "def", SamplingParams(temperature=0, max_tokens=4, min_tokens=2))
    assert (output.error, output.outputs[0].finish_reason) == (None, "length")


def test_a_forked_child_makes_an_llm_of_its_own() -> None:
    """In a process of its own, whose threads are only those of the first LLM."""
    code = """
        import multiprocessing, sys
        from quire import LLM, SamplingParams

        def answer():
            llm = LLM(kv_cache_memory="32MiB")
            return llm.generate("def", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].text

        expected = answer()
        child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(answer() != expected))
        child.start()
        child.join(30)
        child.kill()
        sys.exit(child.exitcode != 0)
    """
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_a_call_in_the_middle_of_another_one_is_refused_and_costs_nothing(llm: LLM) -> None:
    said: list[str] = []

    class Bar:
        """Is told of the progress between two steps, in the same thread."""

        postfix = ""

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def set_postfix_str(self, *_: Any, **__: Any) -> None: ...
        def close(self) -> None: ...
        def update(self, _: int) -> None:
            with pytest.raises(RequestError) as refused:
                generate(llm, "again")
            said.append(str(refused.value))

    (output,) = llm.generate(["one"], GREEDY, use_tqdm=Bar)
    assert output.outputs[0].text
    assert set(said) == {
        "this LLM is in the middle of another call, of another thread or around a logits processor: use one LLM for "
        "each thread, or AsyncLLM"
    }
    assert generate(llm, "later")[0].finished


def test_requests_that_somebody_else_aborts_end_the_call(llm: LLM, executor: RecitingExecutor) -> None:
    executor.before_step = lambda step: [llm.engine.abort_request(name) for name in list(llm.engine._groups)]
    outputs = generate(llm, ["one", "two"])
    assert [output.error for output in outputs] == ["the request was ended by another call of the engine"] * 2
    executor.before_step = lambda step: None
    assert generate(llm, "three")[0].error is None


@pytest.mark.parametrize("given", [5, {5: 5}, ["a"]])
def test_variables_of_the_template_have_names(llm: LLM, given: Any) -> None:
    with pytest.raises(InvalidParamsError, match=r"chat_template_kwargs=.*must be a dict"):
        llm.chat([USER], GREEDY, use_tqdm=False, chat_template_kwargs=given)


def test_variables_of_the_template_replace_arguments(llm: LLM) -> None:
    prompts = [
        llm.chat([USER], GREEDY, use_tqdm=False, **given)[0].prompt_token_ids
        for given in ({"add_generation_prompt": False}, {"chat_template_kwargs": {"add_generation_prompt": False}})
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("name", ["add_request", "abort_request"])
def test_an_interrupt_while_requests_come_or_go_leaves_none_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    method, interrupts = getattr(llm.engine, name), [signal.SIGINT]

    def and_interrupt(*arguments: Any, **named: Any) -> None:
        method(*arguments, **named)
        while interrupts:
            signal.raise_signal(interrupts.pop())

    monkeypatch.setattr(llm.engine, name, and_interrupt)
    if name == "abort_request":
        monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["one", "two", "three"])
    assert not llm.engine.has_unfinished_requests()
    monkeypatch.undo()
    assert generate(llm, "later")[0].error is None
