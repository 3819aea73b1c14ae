"""Stages: every family, format and kind of request gives the bits of one process, in small caches, also with ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.common.batch import Batch
from quire.config.model import ModelConfig
from quire.runner.parallel.pipeline.executor import PipelineExecutor
from tests.kernels.isas import needs_native
from tests.models.gguf_convert import convert
from tests.models.test_windows_in_the_engine import make_llm
from tests.models.variants import VARIANTS
from tests.parallel import test_families as families
from tests.parallel.ends import TINY
from tests.parallel.ranks import answers, in_threads, of_ranks
from tests.parallel.test_requests import PARAMS, PROMPTS, check_mixed_requests, formats_and_drafts, of_adapters

pytestmark = needs_native


def of_stages(num_stages: int, num_ranks: int = 1, **given: Any) -> list[Any]:
    return of_ranks(num_ranks, PROMPTS, PARAMS, pipeline_parallel_size=num_stages, **given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.thorough] * (i % 3 > 0)) for i, name in enumerate(VARIANTS)]
)
def test_stages_give_the_bits_of_one_process(variant: str, save_checkpoint: Any) -> None:
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields | {"vocab_size": 8192})
    num_layers = ModelConfig.resolve(folder).hf_config.size("num_hidden_layers")
    expected = families.run(folder, 1)
    assert families.run(folder, 1, pipeline_parallel_size=min(3, num_layers)) == expected
    assert families.run(folder, 2, pipeline_parallel_size=min(2, num_layers)) == expected


@pytest.mark.parametrize(
    ("num_stages", "num_ranks", "dtype"),
    [
        (2, 1, "bfloat16"),
        pytest.param(3, 1, "float32", marks=pytest.mark.slow),
        pytest.param(2, 2, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_mixed_requests_in_a_small_cache_equal_one_process(num_stages: int, num_ranks: int, dtype: str) -> None:
    kind = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_ranks, "preemption_mode": "swap"}
    (stats,) = check_mixed_requests(num_stages, 40, dtype, [kind])
    assert stats.num_swapped_blocks > 0


@formats_and_drafts
def test_formats_and_drafts_equal_one_process(given: dict[str, Any]) -> None:
    expected = of_stages(1, **TINY, **given)
    assert of_stages(2, **TINY, **given) == expected
    assert of_stages(2, 2, **TINY, **given) == expected


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_gguf_files_equal_one_process(quantization: str | None, llama: Path, tmp_path: Path) -> None:
    path = convert(llama, tmp_path / "m.gguf")

    def run(**how: Any) -> list[Any]:
        with in_threads():
            llm = make_llm(path, max_model_len=64, quantization=quantization, num_threads=1, **how)
            try:
                return answers(llm, [[i % 60 for i in prompt] for prompt in PROMPTS], PARAMS)
            finally:
                llm.engine.executor.close()

    assert run(pipeline_parallel_size=2) == run()


def test_adapters_are_loaded_and_unloaded_in_all_stages(tmp_path: Path) -> None:
    expected = of_adapters(tmp_path)
    assert [each[0].token_ids for each in expected] != token_ids(of_stages(1, **TINY))
    assert of_adapters(tmp_path, pipeline_parallel_size=3) == expected
    assert of_adapters(tmp_path, pipeline_parallel_size=2, tensor_parallel_size=2) == expected


def token_ids(answers: Sequence[Any]) -> list[list[int]]:
    return [outputs[0].token_ids for outputs, _, _ in answers]


def test_batches_of_other_requests_are_computed_while_one_is_in_the_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[tuple[str, frozenset[int]]]()

    def noting(name: str) -> None:
        method = getattr(PipelineExecutor, name)

        def call(self: PipelineExecutor, batch: Batch) -> Any:
            events.append((name, frozenset(s.seq_id for s in batch.sequences)))
            return method(self, batch)

        monkeypatch.setattr(PipelineExecutor, name, call)

    noting("submit")
    noting("execute")
    of_stages(2, **TINY)
    in_flight, sizes = set[frozenset[int]](), list[int]()
    for name, seq_ids in events:
        if name == "submit":
            assert not any(seq_ids & other for other in in_flight)
            in_flight.add(seq_ids)
        else:
            sizes.append(len(in_flight))
            in_flight.remove(seq_ids)
    assert sizes.count(2) > 0.7 * len(sizes)


def test_the_prefix_cache_can_be_reset_while_batches_are_in_flight() -> None:
    expected = of_stages(1, **TINY)
    with in_threads():
        engine = LLM(**TINY, pipeline_parallel_size=2, num_threads=1).engine
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(i), prompt, params)
        done = {}
        for step in range(1000):
            if step % 3 == 1:
                assert engine.reset_prefix_cache(reset_running_requests=True)
            done |= {int(output.request_id): output.outputs for output in engine.step() if output.finished}
            engine.requests.check_integrity()
            if not engine.has_unfinished_requests():
                break
        assert [done[i] for i in range(len(PROMPTS))] == [outputs for outputs, _, _ in expected]
        engine.executor.close()


def test_an_engine_with_stages_sleeps_and_wakes_up() -> None:
    expected = of_stages(1, **TINY)
    with in_threads():
        llm = LLM(**TINY, pipeline_parallel_size=2, num_threads=1)
        assert answers(llm, PROMPTS, PARAMS) == expected
        llm.engine.sleep()
        llm.engine.wake_up()
        assert answers(llm, PROMPTS, PARAMS) == expected
        llm.engine.executor.close()
