"""A checkpoint made wider says what it said before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.speculation.heads import WIDTH, eagle, layer_tensors, write
from tools.wide_twin import write_wide_head, write_wide_twin

SMALL = {"max_model_len": 64, "num_gpu_blocks_override": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin")
    return write_wide_twin("quire-tiny", folder, hidden=320, intermediate=800, heads=6, layers=7)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_wide_twin_has_the_tokens_of_the_small_model(twin: Path, quantization: str | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    question = [{"role": "user", "content": "What does json.dumps do?"}]
    small, wide = (LLM(model, **SMALL, quantization=quantization) for model in (None, twin))
    config = wide.engine.model_config.hf_config
    assert (config["hidden_size"], config["num_key_value_heads"], config["num_hidden_layers"]) == (320, 3, 7)
    expected, found = (llm.chat(question, params, use_tqdm=False)[0].outputs[0] for llm in (small, wide))
    assert found.token_ids == expected.token_ids
    assert found.text.startswith("Serialize")


def test_a_twin_is_not_narrower(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_hidden_layers=2 is less than the 6 of quire-tiny"):
        write_wide_twin("quire-tiny", tmp_path, layers=2)


def test_a_wide_head_drafts_for_the_twin_what_the_head_drafts_for_the_small_model(twin: Path, tmp_path: Path) -> None:
    shape = {"intermediate_size": 768, "head_dim": 64}
    rng = torch.Generator().manual_seed(0)
    head = eagle()
    head.config |= shape
    head.tensors |= layer_tensors(rng, head.config, WIDTH)
    folder = write(tmp_path / "head", head, {})
    wide = write_wide_head("quire-tiny", folder, tmp_path / "wide", hidden=320, intermediate=800, heads=6)
    question, found = [{"role": "user", "content": "What does json.dumps do?"}], []
    for model, path in ((None, folder), (twin, wide)):
        llm = LLM(
            model, **SMALL, speculative_config={"model": str(path), "num_speculative_tokens": 2, "adaptive": False}
        )
        execute, drafts = llm.engine.executor.execute, list[tuple[int, ...]]()

        def keeping(batch: Any, execute: Any = execute, drafts: Any = drafts) -> Any:
            result = execute(batch)
            drafts.extend(drafted.token_ids for drafted in result.drafted.values())
            return result

        llm.engine.executor.execute = keeping
        llm.chat(question, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        found.append(drafts)
    assert found[0] == found[1]
    assert len(found[0]) > 8
