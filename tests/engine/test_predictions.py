"""Predictions offline: `SamplingParams.prediction` saves steps and changes no token."""

import asyncio

import pytest

from quire import LLM, AsyncLLM, EngineArgs, InvalidParamsError, SamplingParams
from quire.common.params import BeamSearchParams
from quire.interfaces.async_llm.engine_message import engine_message

from ..scripted_engine import recital, scripted_llm

FIXED = {"method": "prediction", "num_speculative_tokens": 6, "adaptive": False}
PROMPTS = ["What does json.dumps do?", "def area(r):\n"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_gpu_blocks_override=128, max_model_len=512, speculative_config=FIXED)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 24, "temperature": 0.8, "seed": 7, "logprobs": 2, "ignore_eos": True} | fields
    )


@pytest.mark.parametrize("n", [1, 3])
def test_right_predictions_save_steps_and_change_no_bit(llm: LLM, n: int) -> None:
    before = llm.engine.stats().num_steps
    plain = llm.generate(PROMPTS, params(n=n), use_tqdm=False)
    middle = llm.engine.stats().num_steps
    expected = [params(n=n, prediction=output.outputs[-1].token_ids) for output in plain]
    outputs = llm.generate(PROMPTS, expected, use_tqdm=False)
    assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    after = llm.engine.stats().num_steps
    assert after - middle <= middle - before
    for output in outputs:
        assert output.metrics is not None
        (drafts,) = output.metrics.drafts.values()
        last = output.outputs[-1]
        assert drafts[1] >= len(last.accepted_drafts) > 12
        assert set(last.accepted_drafts) < set(range(24))
        assert output.metrics.num_drafts == drafts
    if n == 1:
        assert after - middle <= 8
    llm.engine.requests.check_integrity()


def test_a_prediction_is_text_in_generate_and_in_chats(llm: LLM) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    greedy = SamplingParams(temperature=0, max_tokens=24, min_tokens=24)
    for run, given in ((llm.generate, PROMPTS[0]), (llm.chat, messages)):
        (plain,) = run(given, greedy, use_tqdm=False)  # type: ignore[operator]
        predicting = SamplingParams(temperature=0, max_tokens=24, min_tokens=24, prediction=plain.outputs[0].text)
        (output,) = run(given, predicting, use_tqdm=False)  # type: ignore[operator]
        assert output.outputs == plain.outputs
        assert len(output.outputs[0].accepted_drafts) > 8


def test_a_prediction_has_no_effect_with_logits_processors() -> None:
    llm, executor = scripted_llm(speculative_config=FIXED)
    asked = SamplingParams(max_tokens=30, prediction=recital(2), logits_processors=[lambda ids, logits: logits])
    (output,) = llm.generate("Hello", asked, use_tqdm=False)
    assert output.metrics is not None
    assert output.metrics.drafts == {}
    assert executor.num_steps == len(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        ([8192], "prediction has 8192: this model's token ids end at"),
        ([5] * 257, "prediction has 257 tokens, and the context holds 256"),
        ("a b " * 70_000, "prediction: the text has 280,000 characters"),
        (" zz" * 300, "prediction has .* tokens, and the context holds 256: shorten it"),
    ],
)
def test_a_prediction_that_cannot_be_is_refused(prediction: str | list[int], words: str) -> None:
    llm, _ = scripted_llm()
    with pytest.raises(InvalidParamsError, match=words):
        llm.engine.add_request("a", "Hello", SamplingParams(prediction=prediction))
    assert not llm.engine.has_unfinished_requests()


def test_a_beam_search_has_no_prediction() -> None:
    with pytest.raises(InvalidParamsError, match="prediction"):
        BeamSearchParams(2, 4, prediction="x")  # type: ignore[call-arg]


def test_the_engine_process_receives_tokens() -> None:
    """Only the API process has the time to tokenize a long text."""
    llm, _ = scripted_llm()
    given = SamplingParams(prediction="some text")
    checked = llm.engine.inputs.request("a", "Hello", given, 0.0)
    message = engine_message(1, checked, given, 0)
    token_ids = llm.engine.tokenizer.encode("some text", add_special_tokens=False)
    assert b"some text" not in bytes(message.params)  # type: ignore[union-attr]
    assert checked.outputs.params.prediction == token_ids
    assert given.prediction == "some text"
    checked.outputs.prompt_token_ids.clear()  # as a caller may
    assert message.token_ids, "what is sent again if the engine dies"


@pytest.mark.slow
def test_predictions_pass_between_the_processes() -> None:
    async def run() -> tuple[list[int], list[int], dict[str, tuple[int, int]]]:
        args = EngineArgs(num_gpu_blocks_override=64, max_model_len=256, speculative_config=FIXED)
        llm = await AsyncLLM.from_args(args)
        try:
            whole = [output async for output in llm.generate(PROMPTS[0], params(output_kind="final_only"), "a")]
            token_ids = whole[0].outputs[0].token_ids
            asked = params(output_kind="delta", prediction=token_ids)
            found, drafts = list[int](), list[int]()
            async for output in llm.generate(PROMPTS[0], asked, "b"):
                drafts += [len(found) + place for place in output.outputs[0].accepted_drafts]
                found += output.outputs[0].token_ids
            assert found == token_ids
            assert output.metrics is not None
            return found, drafts, output.metrics.drafts
        finally:
            await llm.shutdown()

    found, drafts, counts = asyncio.run(run())
    assert counts == {"prediction": (len(drafts), len(drafts))}
    assert len(found) > len(drafts) > len(found) / 2
    assert drafts == sorted(set(drafts))
