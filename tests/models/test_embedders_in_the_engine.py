"""Decoders that became embedders, and encoders, through the whole engine: transformers' vectors."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from quire import LLM, PoolingParams
from tests.kernels.isas import needs_native
from tests.models.encoders import ENCODERS
from tests.models.families import SMALL
from tests.models.test_windows_in_the_engine import make_llm

SHARED = [7 * i % 50 + 10 for i in range(30)]
TEXTS = [SHARED + [60 + i] * (5 * i % 23 + 1) for i in range(8)]
RAW = PoolingParams(normalize=False)


def vectors(llm: LLM, texts: list[list[int]]) -> list[np.ndarray]:
    return [output.outputs.data for output in llm.embed(texts, pooling_params=RAW, use_tqdm=False)]


@needs_native
def test_a_qwen3_embedder_is_equal_whole_in_chunks_and_after_a_hit(save_checkpoint: Any) -> None:
    folder, oracle = save_checkpoint("Qwen3ForCausalLM", **SMALL, head_dim=16)
    llm = make_llm(folder, runner="pooling", max_model_len=64)
    whole = []
    for text in TEXTS:
        llm.reset_prefix_cache()
        whole += vectors(llm, [text])
        with torch.no_grad():
            expected = oracle.model(torch.tensor([text])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(whole[-1]), expected, rtol=1e-4, atol=1e-4)
    hit = [output.num_cached_tokens for output in llm.embed(TEXTS[:-1], use_tqdm=False)]
    assert min(hit) >= 28, "the shared beginning comes from the cache"
    for arguments in {}, {"max_num_batched_tokens": 16}, {"max_num_batched_tokens": 1}, {"num_gpu_blocks_override": 16}:
        other = make_llm(folder, runner="pooling", max_model_len=64, **arguments)
        for _ in range(2):
            assert all(np.array_equal(a, b) for a, b in zip(whole, vectors(other, TEXTS), strict=True))


@needs_native
def test_an_encoder_runs_in_the_engine(tmp_path: Path) -> None:
    family, fields = ENCODERS["bert"]
    kind = getattr(transformers, f"{family}Model")
    torch.manual_seed(0)
    oracle = kind(kind.config_class(**fields)).eval()
    oracle.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), tokenizer="quire-tiny", dtype="float32")
    assert llm.engine.plan.kv_cache.total_bytes == 0
    texts = [text[:40] for text in TEXTS]
    for text, vector in zip(texts, vectors(llm, texts), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([text])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(torch.tensor(vector), expected, rtol=1e-4, atol=1e-4)
