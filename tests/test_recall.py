"""What the embedded checkpoints were measured at when they were trained, reproduced by Quire."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.batch import ScheduledSequence
from quire.config.kv_layout import kv_cache_config
from quire.config.model import ModelConfig
from quire.models.loader import load_model
from quire.runner.cache_engine import CacheEngine
from quire.runner.model_runner import build_tensors

DATA = Path(__file__).parent / "data"
BLOCK_SIZE = 16
MEASURED_EXACT = 281


@pytest.mark.parametrize(
    ("arguments", "fewer"),
    [({}, 3), ({"kv_cache_dtype": "int8"}, 4), ({"quantization": "int8"}, 4), ({"quantization": "int4"}, 9)],
)
def test_quire_tiny_answers_as_many_questions_exactly_as_measured(arguments: dict[str, str], fewer: int) -> None:
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
    [(None, "float32", 1e-3), (None, "int8", 1e-2), ("int8", "float32", 1e-2), ("int4", "float32", 5e-2)],
)
@pytest.mark.parametrize("name", ["quire-tiny", "quire-draft"])
def test_perplexity_on_source_code(name: str, quantization: str | None, kv_cache_dtype: str, within: float) -> None:
    data = json.loads((DATA / "decoder_tokens.json").read_text(encoding="utf-8"))
    token_ids = torch.tensor(data["token_ids"])
    config = ModelConfig.resolve(name, dtype="float32", quantization=quantization)
    model = load_model(config)
    specs = [dataclasses.replace(spec, dtype=kv_cache_dtype) for spec in model.kv_cache_specs(config)]
    kv_cache = kv_cache_config(specs, BLOCK_SIZE, num_blocks=len(token_ids) // BLOCK_SIZE)
    table = np.arange(kv_cache.num_blocks, dtype=np.int32)
    whole_text = ScheduledSequence(0, tuple(data["token_ids"]), start=0, block_tables=(table,), draws=())
    with torch.inference_mode():
        hidden = model(build_tensors([whole_text], BLOCK_SIZE), CacheEngine(kv_cache).layers)
        logits = model.compute_logits(hidden[:-1])
    perplexity = math.exp(torch.nn.functional.cross_entropy(logits, token_ids[1:]).item())
    assert perplexity == pytest.approx(data["perplexity"][name], rel=within)
