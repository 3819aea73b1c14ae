"""Numbers of NumPy and torch, in prompts and parameters."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import LLM, BeamSearchParams, InvalidParamsError, InvalidPromptError, PoolingParams, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)
IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "prompt",
    [
        np.array(IDS),
        torch.tensor(IDS),
        list(np.array(IDS, np.int32)),
        [5, *torch.tensor([6, 7])],
        {"prompt_token_ids": np.array(IDS, np.uint16)},
        {"prompt_token_ids": [5, np.int64(6), 7]},
    ],
)
def test_a_prompt_may_be_an_array_or_have_its_numbers(llm: LLM, prompt: Any) -> None:
    prompts = [prompt] if isinstance(prompt, list) and isinstance(prompt[0], int) else prompt
    (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert output.error is None
    assert output.prompt_token_ids == IDS
    assert set(map(type, output.prompt_token_ids)) == {int}
    assert output.outputs[0].token_ids == llm.generate(IDS, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_the_rows_of_an_array_are_prompts(llm: LLM) -> None:
    outputs = llm.generate(np.array([IDS, IDS[::-1]]), GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [IDS, IDS[::-1]]


@pytest.mark.parametrize("prompt", [np.array([5.0, 6.0]), [np.array([5, 6])], [np.float32(5)], [True, np.bool_(True)]])
def test_other_numbers_are_no_token_ids(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidPromptError, match="token id"):
        llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)


def test_parameters_may_be_numbers_of_numpy_or_torch() -> None:
    given: dict[str, Any] = {"max_tokens": np.int64(5), "seed": torch.tensor(3), "temperature": np.float32(0.5)}
    params = SamplingParams(**given, ignore_eos=np.bool_(True))  # type: ignore[arg-type]
    assert params == SamplingParams(max_tokens=5, seed=3, temperature=0.5, ignore_eos=True)
    params.min_tokens = np.int16(2)  # type: ignore[assignment]
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    assert BeamSearchParams(beam_width=np.int64(2), max_tokens=3).beam_width == 2  # type: ignore[arg-type]
    assert PoolingParams(dimensions=np.int64(8)).dimensions == 8  # type: ignore[arg-type]
    with pytest.raises(InvalidParamsError, match=r"max_tokens=0\.5: must be at least 1"):
        SamplingParams(max_tokens=np.float64(0.5))  # type: ignore[arg-type]
