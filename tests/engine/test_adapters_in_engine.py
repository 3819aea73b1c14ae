"""LoRA adapters in the real engine: each request gets the bits that it gets alone, whoever shares cache and slots."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quire import LLM, BeamSearchParams, InvalidParamsError, LoRARequest, RequestError, RequestOutput, SamplingParams
from quire.common.batch import Batch, StepResult
from quire.common.errors import CheckpointError
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter

PARAMS = SamplingParams(temperature=0, max_tokens=10, logprobs=1, ignore_eos=True)
PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(max_loras=4)


def make_llm(**kwargs: Any) -> LLM:
    defaults = {"enable_lora": True, "max_lora_rank": 4, "max_model_len": 128, "num_gpu_blocks_override": 64}
    defaults["speculative_config"] = {"method": "off"}
    return LLM(**defaults | {"disable_log_stats": False} | kwargs)


@pytest.fixture(scope="module")
def folders(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    sizes = tiny_sizes(llm.engine.model_config)
    path = tmp_path_factory.mktemp("adapters")
    return [write_adapter(path / str(i), make_tensors(sizes, 2, seed=i), r=2, lora_alpha=2) for i in range(8)]


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    check(llm)
    for adapter in llm.engine.adapters:
        llm.engine.remove_lora(adapter.lora_int_id)
    assert not llm.engine.list_loras()
    assert not llm.engine.scheduler.adapters.loaded
    llm.reset_prefix_cache()


def check(llm: LLM) -> None:
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0
    llm.engine.requests.check_integrity()
    llm.engine.scheduler.adapters.check_integrity()


def bits(output: RequestOutput) -> Any:
    assert output.error is None
    return [(one.token_ids, [row[t].logprob for row, t in zip(one.logprobs, one.token_ids, strict=True)])
            for one in output.outputs]  # fmt: skip


def request(folder: Path, number: int = 1, **kwargs: Any) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, str(folder), **kwargs)


def run(llm: LLM, prompts: Any, of: Any, params: Any = PARAMS) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, lora_request=of)


@pytest.mark.essential
def test_no_prefix_is_shared_between_adapters_and_equal_content_is_one_adapter(llm: LLM, folders: list[Path]) -> None:
    alone = [bits(run(llm, PROMPT, of)[0]) for of in (None, request(folders[0], 1), request(folders[1], 2))]
    assert len({str(each) for each in alone}) == 3
    again = [run(llm, PROMPT, of)[0] for of in (None, request(folders[0], 1), request(folders[1], 2))]
    assert [bits(output) for output in again] == alone
    assert [output.num_cached_tokens for output in again] == [39] * 3
    llm.reset_prefix_cache()
    assert run(llm, PROMPT, None)[0].num_cached_tokens == 0
    assert run(llm, PROMPT, request(folders[0], 1))[0].num_cached_tokens == 0
    other_name = run(llm, PROMPT, request(shutil.copytree(folders[0], folders[0].parent / "copy"), 3))[0]
    assert other_name.num_cached_tokens == 39
    assert bits(other_name) == alone[1]
    assert {adapter.name for adapter in llm.engine.scheduler.adapters.loaded} == {"adapter-2", "adapter-3"}


def test_a_name_with_new_content_shares_nothing_with_the_old(llm: LLM, folders: list[Path]) -> None:
    old, new = (bits(run(llm, PROMPT, request(folders[i], 5 + i))[0]) for i in (0, 1))
    llm.engine.remove_lora(6)
    with pytest.raises(RequestError, match=r"'adapter-5' is loaded already with other content, from .*load_inplace"):
        run(llm, PROMPT, request(folders[1], 5))
    assert bits(run(llm, PROMPT, request(folders[0], 5))[0]) == old
    replaced = run(llm, PROMPT, request(folders[1], 5, load_inplace=True))[0]
    assert bits(replaced) == new
    assert bits(run(llm, PROMPT, request(folders[1], 5))[0]) == new


def test_a_request_keeps_the_content_that_it_began_with(llm: LLM, folders: list[Path]) -> None:
    expected = [bits(run(llm, PROMPT, request(folder, 1, load_inplace=True))[0]) for folder in folders[:2]]
    llm.engine.add_lora(request(folders[0], 1, load_inplace=True))
    for place, folder in enumerate(folders[:2]):
        llm.engine.add_lora(request(folder, 1, load_inplace=True))
        llm.engine.add_request(str(place), PROMPT, PARAMS, lora_request=request(folder, 1))
        llm.engine.step()
    assert llm.engine.remove_lora(1)
    done: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.engine.step()}
    assert [bits(done[str(place)]) for place in range(2)] == expected
    assert not llm.engine.scheduler.adapters.loaded


RANKS = (4, 5, 8, 16, 24, 32, 48, 64)


@pytest.mark.essential
@pytest.mark.parametrize(("swap_space", "max_loras", "num_blocks"), [(0.0, 8, 22), (0.01, 8, 22), (0.0, 3, 12)])
def test_a_small_cache_and_few_slots_change_no_bit(
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    swap_space: float,
    max_loras: int,
    num_blocks: int,
) -> None:
    """Eight adapters of ranks 4 to 64 and the base in a batch: preemptions, prefix hits, swaps, turns in the slots.

    The base's rows have the bits of an engine without adapters.
    """
    sizes = tiny_sizes(llm.engine.model_config)
    folders = [
        write_adapter(tmp_path / str(rank), make_tensors(sizes, rank, seed=rank), r=rank, lora_alpha=rank // 2)
        for rank in RANKS
    ]
    adapters = [None, *(request(folder, 1 + i) for i, folder in enumerate(folders))] * 2
    prompts = [PROMPT[: 20 + i] for i in range(len(adapters))]
    params = PARAMS if not swap_space else SamplingParams(temperature=1, seed=3, n=2, max_tokens=10, logprobs=1)
    plain, large = make_llm(enable_lora=False), make_llm(max_lora_rank=64, max_loras=8)
    engines = [plain if of is None else large for of in adapters]
    alone = [
        bits(run(engine, prompt, of, params)[0]) for engine, prompt, of in zip(engines, prompts, adapters, strict=True)
    ]
    mode = "swap" if swap_space else "recompute"
    small = make_llm(max_lora_rank=64, max_loras=max_loras, num_gpu_blocks_override=num_blocks, swap_space=swap_space,
                     preemption_mode=mode, max_model_len=64)  # fmt: skip
    mixes: set[int] = set()
    execute = small.engine.executor.execute

    def watched(batch: Batch) -> StepResult:
        mixes.add(len({scheduled.adapter for scheduled in batch.sequences}))
        return execute(batch)

    monkeypatch.setattr(small.engine.executor, "execute", watched)
    together = run(small, prompts, adapters, params)
    assert [bits(output) for output in together] == alone
    assert len({str(each) for each in alone}) == len(alone)
    assert max(mixes) == max_loras + 1
    assert small.engine.stats().num_preemptions > 0
    assert bool(small.engine.stats().num_swapped_blocks) == bool(swap_space)
    assert small.engine.stats().num_prefix_hit_tokens > 0
    check(small)


def test_everything_else_that_runs_uses_the_adapter_too(llm: LLM, folders: list[Path]) -> None:
    of = request(folders[0])
    text = "def add(a, b):\n    return"
    pairs = [
        lambda lora: llm.score_tokens(text, [" a", " b"], use_tqdm=False, lora_request=lora),
        lambda lora: llm.perplexity([text], use_tqdm=False, lora_request=lora),
        lambda lora: llm.beam_search(text, BeamSearchParams(beam_width=2, max_tokens=3), lora_request=lora),
        lambda lora: llm.chat([{"role": "user", "content": text}], PARAMS, use_tqdm=False, lora_request=lora),
        lambda lora: run(llm, text, lora, SamplingParams(prompt_logprobs=1, max_tokens=1))[0].prompt_logprobs,
    ]
    for call in pairs:
        assert str(call(of)) != str(call(None))
    pin = llm.pin_prefix(PROMPT, lora_request=of)
    llm.reset_prefix_cache()
    assert run(llm, PROMPT, of)[0].num_cached_tokens == 39
    assert run(llm, PROMPT, None)[0].num_cached_tokens == 0
    llm.unpin_prefix(pin)


def test_one_for_all_or_one_for_each(llm: LLM, folders: list[Path]) -> None:
    with pytest.raises(InvalidParamsError, match="2 lora_requests for 3 prompts"):
        run(llm, ["a", "b", "c"], [None, None])
    with pytest.raises(InvalidParamsError, match="must be a LoRARequest or None, not int"):
        run(llm, "a", 1)
    assert len(run(llm, ["a", "b"], request(folders[0]))) == 2


def test_outputs_name_their_adapter(llm: LLM, folders: list[Path]) -> None:
    asked = LoRARequest("adapter-1", 1, str(folders[0]), "base")
    outputs = run(llm, [PROMPT] * 2, [asked, None])
    assert [output.lora_request for output in outputs] == [asked, None]


def test_an_adapter_on_the_hub_is_downloaded_once_without_pickles(
    llm: LLM, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[list[str]] = []

    def download(name: str, **options: Any) -> str:
        assert name == "org/adapter"
        downloads.append(options["allow_patterns"])
        return str(folders[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    asked = LoRARequest("mine", 1, "org/adapter")
    first, second = (run(llm, PROMPT, asked)[0] for _ in range(2))
    assert bits(first) == bits(second) == bits(run(llm, PROMPT, request(folders[0], 2))[0])
    assert first.lora_request == asked
    assert downloads == [["adapter_config.json", "adapter_model.safetensors"]]


def test_a_pinned_adapter_stays_loaded(llm: LLM, folders: list[Path]) -> None:
    engine = llm.engine
    numbers = range(1, 7)
    for number in numbers:
        engine.add_lora(request(folders[number - 1], number))
    assert [engine.pin_lora(number) for number in (1, 2, 2, 3, 9)] == [True, True, True, True, False]
    with pytest.raises(RequestError, match="'adapter-4' cannot be pinned: one of the 4 slots must be left for others"):
        engine.pin_lora(4)
    for number in numbers:
        run(llm, PROMPT, request(folders[number - 1], number))
    assert {adapter.lora_int_id for adapter in engine.scheduler.adapters.loaded} == {1, 2, 3, 6}
    engine.remove_lora(1)
    assert len(engine.adapters.pinned) == 2


def test_an_adapter_that_vanishes_or_changes_ends_only_its_own_requests(llm: LLM, folders: list[Path]) -> None:
    gone, changed = (Path(shutil.copytree(folders[i], folders[0].parent / name)) for i, name in enumerate("xy"))
    for number, folder in enumerate((gone, changed), start=1):
        llm.engine.add_lora(request(folder, number))
    shutil.rmtree(gone)
    shutil.copy(folders[2] / "adapter_model.safetensors", changed)
    outputs = run(llm, [PROMPT] * 4, [request(gone, 1), request(changed, 2), None, request(folders[3], 3)])
    assert "adapter 'adapter-1' could not be loaded" in outputs[0].error
    assert "adapter 'adapter-2' could not be loaded" in outputs[1].error
    assert "has changed since the adapter was added" in outputs[1].error
    assert [output.outputs[0].finish_reason for output in outputs] == ["ignored", "ignored", "length", "length"]
    with pytest.raises(RequestError, match="could not be loaded: its folder has no adapter_config"):
        run(llm, PROMPT, request(gone, 1))
    shutil.rmtree(changed)


def test_what_cannot_be_added_is_refused_with_the_reason(llm: LLM, folders: list[Path], tmp_path: Path) -> None:
    wrong = [
        ({"lora_path": str(tmp_path)}, "has no adapter_config.json"),
        ({"lora_path": str(tmp_path / "none")}, "has no adapter_config.json"),
    ]
    for given, reason in wrong:
        with pytest.raises(RequestError, match=f"the adapter 'a' cannot be used: .*{reason}"):
            run(llm, "a", LoRARequest("a", 1, **given))
        with pytest.raises(CheckpointError, match=reason):
            llm.engine.add_lora(LoRARequest("a", 1, **given))
    sizes = tiny_sizes(llm.engine.model_config)
    high = write_adapter(tmp_path / "high", make_tensors(sizes, 5), r=5, lora_alpha=5)
    other = write_adapter(tmp_path / "other", make_tensors({"model.layers.0.mlp.up_proj": (8, 8)}, 2), r=2)
    outputs = run(llm, ["a", "b", "c"], [request(high, 1), request(other, 2), request(folders[0], 3)])
    assert "more than max_lora_rank=4" in outputs[0].error
    assert "another model's" in outputs[1].error
    assert outputs[2].error is None
    with pytest.raises(RequestError, match="lora_int_id=3 is that of the adapter 'adapter-3'"):
        llm.engine.add_lora(LoRARequest("b", 3, str(folders[1])))
    assert [llm.engine.add_lora(request(folders[0], 3)), llm.engine.add_lora(request(folders[1], 4))] == [False, True]
    assert llm.engine.list_loras() == {3, 4}
    assert [llm.engine.remove_lora(number) for number in (4, 4)] == [True, False]


def test_an_adapter_that_alone_takes_too_much_is_refused(folders: list[Path]) -> None:
    with pytest.raises(RequestError, match=r"takes .* KiB, and lora_memory allows 1\.00 KiB"):
        make_llm(lora_memory=1024).engine.add_lora(request(folders[0]))


def test_adapters_need_an_engine_that_has_them(folders: list[Path]) -> None:
    with pytest.raises(InvalidParamsError, match="need an engine made with enable_lora=True"):
        run(make_llm(enable_lora=False), "a", request(folders[0]))


def test_adapters_of_the_arguments_are_known_from_the_start_and_survive_sleep(folders: list[Path]) -> None:
    llm = make_llm(lora_modules=[f"first={folders[0]}", {"name": "second", "path": str(folders[1])}])
    assert [(adapter.name, adapter.lora_int_id) for adapter in llm.engine.adapters] == [("first", 1), ("second", 2)]
    first = LoRARequest("first", 1, str(folders[0]))
    before = bits(run(llm, PROMPT, first)[0])
    llm.sleep()
    assert not llm.engine.scheduler.adapters.loaded
    llm.wake_up()
    assert bits(run(llm, PROMPT, first)[0]) == before
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.labels.get("lora_name") == "first"}
    assert values == {
        "quire:lora_requests_running": 0,
        "quire:lora_requests_waiting": 0,
        "quire:lora_prompt_tokens": 80,
        "quire:lora_generation_tokens": 20,
    }
    (info,) = [metric for metric in llm.get_metrics() if metric.name == "vllm:lora_requests_info"]
    assert info.labels["max_lora"] == "8"


def test_many_requests_of_more_adapters_than_slots_all_finish(llm: LLM, folders: list[Path]) -> None:
    requests: Sequence[LoRARequest] = [request(folder, 1 + i) for i, folder in enumerate(folders[:5])]
    two = make_llm(max_loras=2)
    params = SamplingParams(temperature=0, max_tokens=3, detokenize=False)
    outputs = run(two, [[50 + i % 7] * 5 for i in range(60)], [requests[i % 5] for i in range(60)], params)
    assert all(output.error is None and len(output.outputs[0].token_ids) == 3 for output in outputs)
    check(two)
    assert len(two.engine.scheduler.adapters.loaded) == 2
