"""Logits processors that are classes, as vLLM's engine takes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, ConfigError, InvalidParamsError, SamplingParams
from quire.interfaces.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)

SMALL: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 24}
MADE: list[str] = []


class Counting(AdapterLogitsProcessor):
    """Forces the tokens 100, 101, ... of a request, which it counts itself, from `extra_args["first"]` on."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        first = (sampling_params.extra_args or {}).get("first", 0)
        if not isinstance(first, int):
            raise ValueError(f"first={first!r} is no token")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        if "first" not in (params.extra_args or {}):
            return None
        token, MADE[:] = params.extra_args["first"], [*MADE, "made"]

        def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            nonlocal token
            assert len(prompt) == 3
            assert output == list(range(params.extra_args["first"], token)) if params.extra_args else False
            forced = torch.full_like(logits, -torch.inf)
            forced[token] = 0.0
            token += 1
            return forced

        return force


class Batched(LogitsProcessor):
    """Forces `extra_args["token"]`, with vLLM's helper for states of rows."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert (vllm_config.model.model, device.type, is_pin_memory) == ("quire-tiny", "cpu", False)
        self.tokens: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.tokens, batch_update, lambda params, _, __: (params.extra_args or {}).get("token"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.tokens.items():
            logits[row, torch.arange(logits.shape[1]) != token] = -torch.inf
        return logits


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("quire-tiny", logits_processors=[Counting, Batched], **SMALL)


def tokens(llm: LLM, extra_args: list[dict[str, Any] | None], **more: Any) -> list[list[int]]:
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=each, **more) for each in extra_args
    ]
    outputs = llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_each_request_has_a_state_of_its_own(llm: LLM) -> None:
    MADE.clear()
    plain = LLM("quire-tiny", **SMALL)
    (free,) = tokens(plain, [None])
    assert tokens(llm, [{"first": 100}, None, {"first": 300}]) == [[100, 101, 102, 103], free, [300, 301, 302, 303]]
    assert MADE == ["made"] * 2


def test_samples_of_a_request_share_no_state(llm: LLM) -> None:
    found = tokens(llm, [{"token": 42}], n=3)
    assert found == [[42] * 4] * 3


def test_states_are_kept_by_row() -> None:
    states = {3: "gone"}
    added = [(row, SamplingParams(seed=row), [1], []) for row in (0, 1)]
    update = BatchUpdate(2, [3], added, [])  # type: ignore[arg-type]
    assert process_dict_updates(states, update, lambda params, _, __: "new" if params.seed else None)
    assert states == {1: "new"}
    assert not process_dict_updates(states, None, lambda params, _, __: "new")


def test_wrong_parameters_and_classes_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParamsError, match="first='a' is no token"):
        tokens(llm, [{"first": "a"}])
    wrong: list[Any] = [[lambda ids, logits: logits], lambda ids, logits: logits, 5, {Counting: 1}]
    for given in wrong:
        with pytest.raises(ConfigError, match=r"must be subclasses of quire\.v1\.sample\.logits_processor"):
            LLM("quire-tiny", logits_processors=given, **SMALL)


def test_one_class_may_be_given_without_a_list(llm: LLM) -> None:
    alone = LLM("quire-tiny", logits_processors=Counting, **SMALL)
    assert tokens(alone, [{"first": 100}]) == tokens(llm, [{"first": 100}])


def test_a_function_may_ask_for_the_prompt() -> None:
    seen = []

    def note(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, list(output)))
        return logits

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logits_processors=[note])
    (output,) = LLM("quire-tiny", **SMALL).generate([[5, 6, 7]], params, use_tqdm=False)
    assert seen == [([5, 6, 7], []), ([5, 6, 7], output.outputs[0].token_ids[:1])]


def test_a_beam_search_that_would_not_run_them_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParamsError, match="beam search runs no logits processors"):
        llm.beam_search("def f(", BeamSearchParams(2, 3))
