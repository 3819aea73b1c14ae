"""`quire quantize` of models that pool: the new folder has all that a text goes through, and gives the same bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, kernels
from quire.cli import main
from quire.config.checkpoint.sentence_transformers import read_sentence_config
from tests.models.encoders import BERT, DEBERTA, DEBERTA_V3

from .test_encoders import LLAMA, TEXTS, run, save, write_modules
from .test_families import add_dense

pytestmark = pytest.mark.skipif(kernels.isa() == "reference", reason="saved weights are in the native kernels' layout")
MODERN = BERT | {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
BGE = {"architectures": ["BgeM3EmbeddingModel"]}


def bert(folder: Path) -> None:
    save(folder, "BertModel", BERT)
    write_modules(folder, {"pooling_mode_mean_tokens": True}, "Dense", "Normalize")
    add_dense(folder, "2_Dense", torch.nn.Linear(32, 24))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9, "do_lower_case": True}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "w1 w2"}}))


def bge_m3(folder: Path) -> None:
    save(folder, "XLMRobertaModel", BERT | {"bos_token_id": 2, "eos_token_id": 3})
    write_modules(folder, {"pooling_mode_cls_token": True}, "Normalize")
    for name, width in (("colbert_linear", 24), ("sparse_linear", 1)):
        layer = torch.nn.Linear(32, width)
        save_file({key: value.data for key, value in layer.named_parameters()}, folder / f"{name}.safetensors")


def qwen3(folder: Path) -> None:
    save(folder, "Qwen3Model", LLAMA | {"head_dim": 8})
    write_modules(folder, {"pooling_mode_lasttoken": True}, "Normalize")


MADE: dict[str, tuple[Callable[[Path], Any], dict[str, Any], tuple[str, ...]]] = {
    "bert": (bert, {}, ("embed", "token_embed")),
    "bge-m3": (bge_m3, BGE, ("embed", "token_embed", "token_classify")),
    "deberta": (
        lambda folder: save(folder, "DebertaV2ForSequenceClassification", DEBERTA | DEBERTA_V3),
        {}, ("classify",),
    ),
    "modernbert": (lambda folder: save(folder, "ModernBertForSequenceClassification", MODERN), {}, ("classify",)),
    "qwen3": (qwen3, {}, ("embed",)),
}  # fmt: skip


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", MADE)
def test_the_folder_gives_the_bits_of_quantizing_at_load(name: str, quantization: str, tmp_path: Path) -> None:
    make, overrides, tasks = MADE[name]
    source, saved = tmp_path / "source", tmp_path / "saved"
    make(source)
    options = ["--hf-overrides", json.dumps(overrides)] if overrides else []
    assert main(["quantize", str(source), str(saved), "--quantization", quantization, *options]) == 0
    with run(source, quantization=quantization, hf_overrides=overrides) as at_load, run(saved) as from_folder:
        assert from_folder.engine.pooler == at_load.engine.pooler
        for task in tasks:
            expected, found = (llm.encode(TEXTS, pooling_task=task, use_tqdm=False) for llm in (at_load, from_folder))
            for output, other in zip(found, expected, strict=True):
                assert other.error is None
                assert np.array_equal(output.outputs.data, other.outputs.data)
    assert read_sentence_config(saved) == read_sentence_config(source)


def test_a_decoder_that_will_pool_says_so_when_it_is_quantized(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert main(["quantize", "quire-tiny", str(saved), "--quantization", "int8", "--runner", "pooling"]) == 0
    options: dict[str, Any] = {"runner": "pooling", "max_model_len": 64, "num_gpu_blocks_override": 20}
    llms = LLM(quantization="int8", **options), LLM(str(saved), **options)
    expected, found = (llm.embed(TEXTS, use_tqdm=False) for llm in llms)
    assert [each.outputs.embedding for each in found] == [each.outputs.embedding for each in expected]
