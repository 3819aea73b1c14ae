"""A checkpoint made wider says what it said before."""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tools.wide_twin import write_wide_twin

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
