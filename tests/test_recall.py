"""What the embedded checkpoints were measured at when they were trained, reproduced by Quire."""

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

DATA = Path(__file__).parent / "data"
MEASURED_EXACT = 281


@pytest.mark.parametrize(
    ("arguments", "fewer"),
    [({}, 3), ({"kv_cache_dtype": "int8"}, 4), ({"quantization": "int8"}, 4), ({"quantization": "int4"}, 9)],
)
def test_quire_tiny_answers_the_measured_number_of_questions_exactly(arguments: dict[str, str], fewer: int) -> None:
    """Measured with transformers in bf16, greedy; another order of summation may flip a near tie or two."""
    questions = json.loads((DATA / "recall.json").read_text(encoding="utf-8"))
    llm = LLM("quire-tiny", dtype="bfloat16", max_model_len=256, kv_cache_memory="32MiB", **arguments)
    outputs = llm.chat(
        [[{"role": "user", "content": entry["question"]}] for entry in questions],
        SamplingParams(temperature=0, max_tokens=120),
        use_tqdm=False,
    )
    exact = [output.outputs[0].text == entry["answer"] for output, entry in zip(outputs, questions, strict=True)]
    assert len(exact) == 300
    assert sum(exact) >= MEASURED_EXACT - fewer


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "within"),
    [(None, "auto", 1e-3), (None, "int8", 1e-2), ("int8", "auto", 1e-2), ("int4", "auto", 5e-2)],
)
@pytest.mark.parametrize("name", ["quire-tiny", "quire-draft"])
def test_perplexity_on_source_code(name: str, quantization: str | None, kv_cache_dtype: str, within: float) -> None:
    data = json.loads((DATA / "decoder_tokens.json").read_text(encoding="utf-8"))
    length = len(data["token_ids"])
    llm = LLM(
        name,
        dtype="float32",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=length,
        kv_cache_memory="32MiB",
    )
    (perplexity,) = llm.perplexity(data["token_ids"], use_tqdm=False)
    assert perplexity == pytest.approx(data["perplexity"][name], rel=within)
