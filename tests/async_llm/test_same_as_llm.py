"""What comes over the wire, piece by piece, is what the offline door gives: text, tokens, log-probabilities."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from quire import LLM, PromptTooLongError, SamplingParams, StructuredOutputsParams
from tests.effort import examples

from .door import Door
from .wanted import KINDS, offline, requests, told, whole

ARGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 96, "num_threads": 1}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LLM, Door]]:
    """Both doors, which get the same requests in the same order: seeds are the same even where none is given."""
    door = Door(**ARGS)
    yield LLM(**ARGS), door
    door.close()


@pytest.mark.essential
@settings(max_examples=examples(30), deadline=None)
@given(wanted=requests)
def test_every_request_gets_the_same(both: tuple[LLM, Door], wanted: list[tuple[Any, Any]]) -> None:
    llm, door = both
    expected = offline(llm, wanted)
    got = door.run(door.all_outputs(wanted))
    for (_, params), output, outputs in zip(wanted, expected, got, strict=True):
        assert told(whole(outputs, getattr(params, "output_kind", "final_only"))) == told(output)
    door.run(door.drained())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_each_sample_as_offline(both: tuple[LLM, Door], kind: str, include: bool) -> None:
    llm, door = both
    params = SamplingParams(
        n=3, seed=1, max_tokens=40, stop=["e", "or"], include_stop_str_in_output=include, logprobs=1, output_kind=kind
    )
    wanted = [("def fibonacci(n):", params)]
    (expected,) = offline(llm, wanted)
    assert (
        len({sample.stop_reason for sample in expected.outputs}) > 1
        or len({len(sample.token_ids) for sample in expected.outputs}) > 1
    ), "the samples end in different places"
    ((*outputs,),) = door.run(door.all_outputs(wanted))
    assert told(whole(outputs, kind)) == told(expected)


def test_a_grammar_that_ends_with_the_last_token_allowed_is_a_stop(both: tuple[LLM, Door]) -> None:
    llm, door = both
    wanted = [("a", SamplingParams(seed=0, max_tokens=1, structured_outputs=StructuredOutputsParams(choice=["a"])))]
    (expected,) = offline(llm, wanted)
    assert expected.outputs[0].finish_reason == "stop"
    ((output,),) = door.run(door.all_outputs(wanted))
    assert told(output) == told(expected)


def test_scores_are_those_of_score_tokens(both: tuple[LLM, Door]) -> None:
    llm, door = both
    (expected,) = llm.score_tokens("def f(x):", " return x + 1", use_tqdm=False)
    output = door.run(door.llm.score_tokens("def f(x):", " return x + 1", request_id="score"))
    known = [(i, row) for i, row in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True) if row]
    assert [token_id for token_id, _ in known] == expected.token_ids
    assert [row[token_id].logprob for token_id, row in known] == expected.logprobs
    alone = door.run(door.llm.score_tokens("def f(x):", None, request_id="score"))
    assert [row is None for row in alone.prompt_logprobs] == [True] + [False] * (len(alone.prompt_token_ids) - 1)


def test_prompts_of_chats_and_texts_become_the_same_tokens(both: tuple[LLM, Door]) -> None:
    llm, door = both
    messages = [{"role": "user", "content": "Hi"}]
    assert door.llm.chat_prompt(messages) == llm.chat_prompt(messages)
    for text in ("short", "a long text, which goes to a thread. " * 150):
        assert door.run(door.llm.tokenize(text)) == llm.engine.tokenizer.encode(text)
    with pytest.raises(PromptTooLongError, match="characters"):
        door.run(door.llm.tokenize("a" * 10_000))
    assert door.llm.default_sampling_params() == llm.default_sampling_params()
    assert door.llm.model_config == llm.engine.model_config
