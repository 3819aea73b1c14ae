"""Embedders that were decoders, vectors and weights of tokens, and reward models, against transformers or formulas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from quire import CheckpointError, PoolingParams, UnsupportedModelError
from tests.models.encoders import BERT, BOTH_WAYS, DECODERS

from .test_encoders import LLAMA, TEXTS, ids_of, run, save, write_modules

RAW = PoolingParams(use_activation=False)


def fields_of(family: str) -> dict[str, Any]:
    return LLAMA | {"head_dim": 8} if family in ("Gemma2", "Gemma3Text", "Qwen3") else LLAMA


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """Add tensors to a checkpoint, and change values of its config."""
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | tensors, weights)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def add_dense(folder: Path, name: str, layer: torch.nn.Linear, **more: Any) -> None:
    """The folder of a module of sentence-transformers."""
    (folder / name).mkdir()
    tensors = {f"linear.{key}": value.data for key, value in layer.named_parameters()}
    save_file(tensors, folder / name / "model.safetensors")
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    (folder / name / "config.json").write_text(json.dumps(sizes | identity | more))


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_embed_by_their_last_token(family: str, tmp_path: Path) -> None:
    oracle = save(tmp_path, f"{family}Model", fields_of(family))
    with run(tmp_path) as llm, torch.no_grad():
        assert llm.engine.pooler.tasks == ("embed", "token_embed")
        for text, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            expected = normalize(oracle(ids_of(text)).last_hidden_state[0, -1], dim=0)
            np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)


def test_a_head_is_left_out_whatever_the_checkpoint_calls_it(tmp_path: Path) -> None:
    fields = {name: LLAMA[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    oracle = save(tmp_path, "GPTNeoXForCausalLM", fields | {"num_attention_heads": 4})  # `embed_out`
    with run(tmp_path, runner="pooling") as llm, torch.no_grad():
        (output,) = llm.embed(TEXTS[2], use_tqdm=False)
        expected = normalize(oracle.gpt_neox(ids_of(TEXTS[2])).last_hidden_state[0, -1], dim=0)
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)


def test_embeddinggemma_goes_through_its_dense_modules(tmp_path: Path) -> None:
    oracle = save(tmp_path, "Gemma3TextModel", BOTH_WAYS["embeddinggemma"][1])
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, "Dense", "Dense", "Normalize")
    wide, narrow = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 16, bias=False)
    add_dense(tmp_path, "2_Dense", wide)
    add_dense(tmp_path, "3_Dense", narrow)
    texts = [*TEXTS, " ".join(f"w{i}" for i in range(30))]
    with run(tmp_path, hf_overrides={"is_matryoshka": True}) as llm, torch.no_grad():
        assert llm.engine.plan.kv_cache.total_bytes == 0
        for text, output in zip(texts, llm.embed(texts, use_tqdm=False), strict=True):
            row = narrow(wide(oracle(ids_of(text)).last_hidden_state[0].mean(0)))
            np.testing.assert_allclose(output.outputs.data, normalize(row, dim=0), atol=1e-4)
        (cut,) = llm.embed(text, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        np.testing.assert_allclose(cut.outputs.data, normalize(row[:8], dim=0), atol=1e-4)


def test_an_embedder_in_both_directions_without_modules_pools_the_mean(tmp_path: Path) -> None:
    oracle = save(tmp_path, "Gemma3TextModel", BOTH_WAYS["embeddinggemma"][1])
    with run(tmp_path) as llm, torch.no_grad():
        (output,) = llm.embed(TEXTS[2], use_tqdm=False)
        expected = normalize(oracle(ids_of(TEXTS[2])).last_hidden_state[0].mean(0), dim=0)
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)


@pytest.mark.parametrize(("architecture", "modes"), [("LlamaForSequenceClassification", ()), ("BertModel", ("last",))])
def test_what_attends_in_both_directions_runs_whole_also_where_the_last_token_is_pooled(
    architecture: str, modes: tuple[str, ...], tmp_path: Path
) -> None:
    """Without a cache the second half of a text would be computed as if the first were not there."""
    save(tmp_path, architecture, {"num_labels": 3} | (LLAMA | {"is_causal": False} if not modes else BERT))
    if modes:
        write_modules(tmp_path, {"pooling_mode_lasttoken": True})
    texts = [" ".join(f"w{i}" for i in range(first, first + 5)) for first in range(6)]
    with run(tmp_path, max_num_batched_tokens=16, max_model_len=16) as llm:
        assert llm.engine.plan.kv_cache.keeps_nothing
        alone = [llm.encode([text], use_tqdm=False, pooling_task=llm.engine.pooler.tasks[0])[0] for text in texts]
        together = llm.encode(texts, use_tqdm=False, pooling_task=llm.engine.pooler.tasks[0])
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one.outputs.data, other.outputs.data)


def test_a_model_in_both_directions_does_not_generate(tmp_path: Path) -> None:
    save(tmp_path, "Qwen2ForCausalLM", LLAMA | {"is_causal": False})
    with pytest.raises(UnsupportedModelError, match=r"'is_causal' false\) is for models that pool"), run(tmp_path):
        pass
    with run(tmp_path, runner="pooling") as llm:
        assert len(llm.embed("w1 w2", use_tqdm=False)[0].outputs.embedding) == 32
    save(tmp_path, "Gemma2ForCausalLM", fields_of("Gemma2") | {"is_causal": False})
    with (
        pytest.raises(UnsupportedModelError, match="both directions with caps, chunks or sinks"),
        run(tmp_path, runner="pooling"),
    ):
        pass


def test_colbert_gives_a_vector_of_each_token(tmp_path: Path) -> None:
    oracle, linear = save(tmp_path, "BertModel", BERT), torch.nn.Linear(32, 16, bias=False)
    rewrite(tmp_path, {"linear.weight": linear.weight.data}, architectures=["HF_ColBERT"])
    with run(tmp_path) as llm, torch.no_grad():
        assert llm.engine.pooler.tasks == ("token_embed",)
        for text, output in zip(TEXTS, llm.encode(TEXTS, use_tqdm=False), strict=True):
            expected = normalize(linear(oracle(ids_of(text)).last_hidden_state[0]), dim=1)
            np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)
        vectors = [normalize(linear(oracle(ids_of(text)).last_hidden_state[0]), dim=1) for text in TEXTS]
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        for other, output in zip(vectors, scores, strict=True):
            expected_score = (vectors[0] @ other.T).amax(1).sum()
            assert output.outputs.score == pytest.approx(float(expected_score), abs=1e-4)
        assert scores[0].outputs.score == pytest.approx(len(vectors[0]), abs=1e-4)
    with (
        pytest.raises(CheckpointError, match=r"has no matrix linear\.weight"),
        run(save_beside(tmp_path), hf_overrides={"architectures": ["HF_ColBERT"]}),
    ):
        pass


def save_beside(folder: Path) -> Path:
    """Another folder, with a BERT alone."""
    save(folder / "beside", "BertModel", BERT)
    return folder / "beside"


def test_pylates_layers_give_a_vector_of_each_token(tmp_path: Path) -> None:
    oracle = save(tmp_path, "ModernBertModel", BERT | {"bos_token_id": 2, "eos_token_id": 3})
    kinds = ["sentence_transformers.models.Transformer", *["pylate.models.Dense.Dense"] * 2]
    modules = [{"idx": i, "path": f"{i}_Dense" if i else "", "type": kind} for i, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    wide, narrow = torch.nn.Linear(32, 48, bias=False), torch.nn.Linear(48, 16, bias=False)
    add_dense(tmp_path, "1_Dense", wide)
    add_dense(tmp_path, "2_Dense", narrow)
    with run(tmp_path) as llm, torch.no_grad():
        for text, output in zip(TEXTS, llm.encode(TEXTS, use_tqdm=False), strict=True):
            rows = narrow(wide(oracle(ids_of(text)).last_hidden_state[0]))
            np.testing.assert_allclose(output.outputs.data, normalize(rows, dim=1), atol=1e-4)
    config = tmp_path / "2_Dense" / "config.json"
    config.write_text(config.read_text().replace("{", '{"use_residual": true, ', 1))
    with pytest.raises(UnsupportedModelError, match="'use_residual' is true"), run(tmp_path):
        pass


def test_bge_m3_gives_embeddings_and_vectors_and_weights_of_tokens(tmp_path: Path) -> None:
    oracle = save(tmp_path, "XLMRobertaModel", BERT | {"bos_token_id": 2, "eos_token_id": 3})
    write_modules(tmp_path, {"pooling_mode_cls_token": True}, "Normalize")
    heads = {"colbert_linear": torch.nn.Linear(32, 24), "sparse_linear": torch.nn.Linear(32, 1)}
    for name in heads:
        (tmp_path / f"{name}.pt").touch()
    asked = {"hf_overrides": {"architectures": ["BgeM3EmbeddingModel"]}}
    with pytest.raises(CheckpointError, match=r"has colbert_linear\.pt, a pickle.*python -c"), run(tmp_path, **asked):
        pass
    for name, head in heads.items():
        save_file({key: value.data for key, value in head.named_parameters()}, tmp_path / f"{name}.safetensors")
    with run(tmp_path, **asked) as llm, torch.no_grad():
        for text in TEXTS:
            rows = oracle(ids_of(text)).last_hidden_state[0]
            expected = {
                "embed": normalize(rows[0], dim=0),
                "token_embed": normalize(heads["colbert_linear"](rows[1:]), dim=1),
                "token_classify": heads["sparse_linear"](rows[1:-1]).relu(),
            }
            for task, vectors in expected.items():
                (output,) = llm.encode(text, pooling_task=task, use_tqdm=False)
                np.testing.assert_allclose(output.outputs.data, vectors, atol=1e-4)
        (raw,) = llm.encode(text, RAW, pooling_task="token_classify", use_tqdm=False)
        np.testing.assert_allclose(raw.outputs.data, heads["sparse_linear"](rows[1:-1]), atol=1e-4)
        (none,) = llm.encode({"prompt_token_ids": [2]}, pooling_task="token_classify", use_tqdm=False)
        assert none.outputs.data.shape == (0, 1)
    with run(tmp_path) as llm:
        assert llm.engine.pooler.tasks == ("embed", "token_embed"), "without the heads, as its config.json says"


REWARDS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}


@pytest.mark.parametrize("architecture", [*REWARDS, "Qwen2ForCausalLM"])
def test_reward_models_give_values_of_each_token(architecture: str, tmp_path: Path) -> None:
    size = REWARDS.get(architecture, 3)
    oracle = save(tmp_path, "Qwen2ForCausalLM", {**LLAMA, "num_labels": 3})
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, size))
    tensors = {f"score.{name}": value.data for name, value in head.named_parameters()}
    unnamed: dict[str, Any] = {"id2label": None, "num_labels": None} if architecture in REWARDS else {}
    rewrite(tmp_path, tensors, architectures=[architecture], **unnamed)
    converted = {} if architecture in REWARDS else {"convert": "reward"}
    with run(tmp_path, **converted) as llm, torch.no_grad():
        for text, output in zip(TEXTS, llm.reward(TEXTS, use_tqdm=False), strict=True):
            rows = oracle.model(ids_of(text)).last_hidden_state[0]
            np.testing.assert_allclose(output.outputs.data, head(rows), atol=1e-4)


def test_a_decoder_converted_to_a_classifier_reads_its_score(tmp_path: Path) -> None:
    oracle = save(tmp_path, "Qwen3ForSequenceClassification", fields_of("Qwen3") | {"num_labels": 1})
    rewrite(tmp_path, {}, architectures=["Qwen3ForCausalLM"])
    with run(tmp_path, convert="classify") as llm, torch.no_grad():
        assert llm.engine.pooler.tasks == ("classify", "score")
        for text, output in zip(TEXTS, llm.reward(TEXTS, pooling_params=RAW, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, oracle(ids_of(text)).logits[0], atol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["reranker", "two ways", "each token"])
def test_a_language_model_classifies_by_the_tokens_of_answers(kind: str, is_tied: bool, tmp_path: Path) -> None:
    oracle = save(tmp_path, "Qwen3ForCausalLM", fields_of("Qwen3") | {"tie_word_embeddings": is_tied})
    keys: dict[str, Any] = {
        "reranker": {"classifier_from_token": ["w5", "w9"], "is_original_qwen3_reranker": True},
        "two ways": {"classifier_from_token": ["w5", "w9"], "method": "from_2_way_softmax"},
        "each token": {"classifier_from_token": ["w5", "w9", "w2"]},
    }[kind]
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], **keys}
    with run(tmp_path, hf_overrides=overrides) as llm, torch.no_grad():
        for text in TEXTS:
            logits = oracle(ids_of(text)).logits[0, -1, [9, 13, 6]]
            if kind == "each token":
                (output,) = llm.classify(text, use_tqdm=False)
                np.testing.assert_allclose(output.outputs.probs, logits.softmax(-1), atol=1e-4)
            else:
                (output,) = llm.encode(text, pooling_task="score", use_tqdm=False)
                assert float(output.outputs.data[0]) == pytest.approx(float(logits[:2].softmax(-1)[1]), abs=1e-4)


@pytest.mark.parametrize("tokens", [["no", "yes"], ["w1"], "w1", [7, "w2"], []])
def test_answers_must_be_tokens(tokens: Any, tmp_path: Path) -> None:
    save(tmp_path, "Qwen3ForCausalLM", fields_of("Qwen3"))
    keys = {"classifier_from_token": tokens, "method": "from_2_way_softmax"}
    with (
        pytest.raises(CheckpointError, match="'classifier_from_token'"),
        run(tmp_path, hf_overrides={"architectures": ["Qwen3ForSequenceClassification"], **keys}),
    ):
        pass
    if tokens == ["no", "yes"]:
        (tmp_path / "tokenizer.json").unlink()
        overrides = {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
        with pytest.raises(CheckpointError, match="in which the tokens of"), run(tmp_path, hf_overrides=overrides):
            pass
