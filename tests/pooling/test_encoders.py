"""Encoders and converted decoders from folders, as callers use them, against transformers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from quire import LLM, CheckpointError, PoolingParams, UnsupportedModelError
from quire.text.tokenizer.tokenizer import Tokenizer
from tests.models.encoders import BERT, DEBERTA, DEBERTA_V3, DECODERS, MODERN

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(92))]
TEXTS = ["w1 w2 w3", "w4", "w7 w8 w9 w10 w11"]
PAIR_TYPES = {"single": "[CLS]:0 $A:0 [SEP]:0", "pair": "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"}
SPECIAL = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
LLAMA = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "num_labels": 3,
    "pad_token_id": 0,
}  # fmt: skip


def save(folder: Path, kind: str, fields: dict[str, Any]) -> Any:
    """A folder with a model of random weights and a tokenizer of words: the model."""
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    model = made(made.config_class(**fields)).eval()
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(**PAIR_TYPES, special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))
    return model


@contextmanager
def run(folder: Path, **arguments: Any) -> Iterator[LLM]:
    """An LLM, in which nothing may be left behind."""
    llm = LLM(str(folder), **{"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 16} | arguments)
    yield llm
    llm.engine.requests.check_integrity()
    assert llm.engine.stats().num_used_blocks == 0


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[2, *(WORDS.index(word) for word in text.split()), 3]])


def write_modules(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    kinds = ["Transformer", "Pooling", *more]
    modules = [
        {"idx": i, "path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))


def test_an_encoder_embeds_through_a_dense_module(tmp_path: Path) -> None:
    oracle = save(tmp_path, "BertModel", BERT)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, "Dense", "Normalize")
    (dense := tmp_path / "2_Dense").mkdir()
    linear = torch.nn.Linear(32, 8)
    save_file({"linear.weight": linear.weight.data, "linear.bias": linear.bias.data}, dense / "model.safetensors")
    tanh = "torch.nn.modules.activation.Tanh"
    sizes = {"in_features": 32, "out_features": 8, "bias": True, "activation_function": tanh}
    (dense / "config.json").write_text(json.dumps(sizes))
    with run(tmp_path) as llm, torch.no_grad():
        for text, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            rows = oracle(ids_of(text)).last_hidden_state[0]
            expected = torch.nn.functional.normalize(torch.tanh(linear(rows.mean(0))), dim=0)
            np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)
            (tokens,) = llm.encode(text, pooling_task="token_embed", use_tqdm=False)
            assert tokens.outputs.data.shape == (len(rows), 8)


def test_a_cross_encoder_reads_both_texts_of_a_pair(tmp_path: Path) -> None:
    oracle = save(tmp_path, "BertForSequenceClassification", BERT | {"num_labels": 1})
    with run(tmp_path) as llm, torch.no_grad():
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        for text, score in zip(TEXTS, scores, strict=True):
            first, second = ids_of(TEXTS[0]), ids_of(text)[:, 1:]
            types = torch.tensor([[0] * first.shape[1] + [1] * second.shape[1]])
            logits = oracle(torch.cat([first, second], dim=1), token_type_ids=types).logits
            assert score == pytest.approx(float(torch.sigmoid(logits)), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "fields"), [("Bert", BERT), ("DebertaV2", DEBERTA | DEBERTA_V3), ("ModernBert", MODERN)]
)
def test_encoders_classify(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    oracle = save(tmp_path, f"{family}ForSequenceClassification", fields)
    with run(tmp_path) as llm, torch.no_grad():
        for text, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.probs, oracle(ids_of(text)).logits[0].softmax(-1), atol=1e-5)


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_classify_by_their_last_token(family: str, tmp_path: Path) -> None:
    fields = LLAMA | {"head_dim": 8} if family in ("Gemma2", "Qwen3") else LLAMA
    oracle = save(tmp_path, f"{family}ForSequenceClassification", fields)
    with run(tmp_path) as llm, torch.no_grad():
        for text, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.probs, oracle(ids_of(text)).logits[0].softmax(-1), atol=1e-4)


def test_a_decoder_with_modules_embeds_by_its_last_token(tmp_path: Path) -> None:
    oracle = save(tmp_path, "Qwen3ForCausalLM", LLAMA | {"head_dim": 8})
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, "Normalize")
    with run(tmp_path) as llm, torch.no_grad():
        for text, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            expected = torch.nn.functional.normalize(oracle.model(ids_of(text)).last_hidden_state[0, -1], dim=0)
            np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)


def test_a_text_is_as_long_as_the_model_was_made_for(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", BERT)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 6, "do_lower_case": true}')
    assert Tokenizer.from_path(tmp_path).encode("W1 w2") == [2, 5, 6, 3]
    with run(tmp_path) as llm:
        cut = {"truncate_prompt_tokens": -1, "use_tqdm": False}
        assert llm.embed(TEXTS[2], **cut)[0].prompt_token_ids == [2, 11, 12, 13, 14, 3]
    with run(tmp_path, max_model_len=32) as llm:
        assert len(llm.embed(TEXTS[2], **cut)[0].prompt_token_ids) == 7


@pytest.mark.parametrize(
    ("limit", "length"), [(5, 5), (10**30, 7), (0, 7), (-1, 7), ("5", 7), (True, 7), (5.0, 7), (None, 7)]
)
def test_a_text_is_as_long_as_the_tokenizer_says_where_the_model_does_not(limit, length, tmp_path: Path) -> None:
    save(tmp_path, "BertModel", BERT)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    (file := tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    cut = {"truncate_prompt_tokens": -1, "use_tqdm": False}
    with run(tmp_path) as llm:
        assert len(llm.embed(TEXTS[2], **cut)[0].prompt_token_ids) == length
    file.write_text('{"max_seq_length": 6}')
    with run(tmp_path) as llm:
        assert len(llm.embed(TEXTS[2], **cut)[0].prompt_token_ids) == 6


@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_text_is_cut_where_the_tokenizer_says(side: str | None, tmp_path: Path) -> None:
    save(tmp_path, "BertForSequenceClassification", BERT | {"num_labels": 1})
    named = {} if side is None else {"truncation_side": side}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **named} | SPECIAL))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    cut = {"truncation": True, "max_length": 6}
    assert Tokenizer.of(theirs).cuts_start is Tokenizer.from_path(tmp_path).cuts_start is (side == "left")
    with run(tmp_path) as llm:
        (alone,) = llm.classify(TEXTS[2], tokenization_kwargs=cut, use_tqdm=False)
        assert alone.prompt_token_ids == theirs(TEXTS[2], **cut).input_ids
        (pair,) = llm.score(TEXTS[0], TEXTS[2], tokenization_kwargs=cut, use_tqdm=False)
        assert pair.prompt_token_ids == theirs(TEXTS[0], TEXTS[2], **cut).input_ids
        (other,) = llm.classify(TEXTS[2], tokenization_kwargs=cut | {"truncation_side": "left"}, use_tqdm=False)
        theirs.truncation_side = "left"
        assert other.prompt_token_ids == theirs(TEXTS[2], **cut).input_ids


@pytest.mark.parametrize(
    "config",
    [
        None,
        *({"tokenizer_class": f"{kind}Tokenizer"} for kind in ("Bert", "Electra", "DistilBert", "Unknown")),
        *({"tokenizer_class": kind} for kind in ("BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")),
        {"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]},
        {"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]},
    ],
    ids=str,
)
def test_pairs_have_token_types_if_transformers_gives_them(config: dict[str, Any] | None, tmp_path: Path) -> None:
    oracle = save(tmp_path, "BertForSequenceClassification", BERT | {"num_labels": 1})
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | SPECIAL))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = theirs(TEXTS[0], TEXTS[2], return_tensors="pt")
    with run(tmp_path) as llm, torch.no_grad():
        (output,) = llm.score(TEXTS[0], TEXTS[2], use_tqdm=False)
        assert output.prompt_token_ids == given["input_ids"][0].tolist()
        assert output.outputs.score == pytest.approx(float(oracle(**given).logits.sigmoid()), abs=1e-5)
    assert Tokenizer.of(theirs).has_token_types == ("token_type_ids" in given)


def test_pairs_have_no_token_types_in_a_model_with_one(tmp_path: Path) -> None:
    oracle = save(tmp_path, "BertForSequenceClassification", BERT | {"num_labels": 1, "type_vocab_size": 1})
    with run(tmp_path) as llm, torch.no_grad():
        (output,) = llm.score(TEXTS[0], TEXTS[2], use_tqdm=False)
        logits = oracle(torch.tensor([output.prompt_token_ids])).logits
        assert output.outputs.score == pytest.approx(float(logits.sigmoid()), abs=1e-5)


def write_cross_encoder(folder: Path, activation: str | None) -> None:
    config = {"model_type": "CrossEncoder", "activation_fn": activation and f"torch.nn.modules.{activation}"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("activation", "problem", "expected"),
    [
        ("linear.Identity", None, lambda x: x),
        ("activation.Sigmoid", "regression", torch.sigmoid),
        ("activation.Tanh", None, torch.tanh),
        (None, "regression", lambda x: x),
    ],
)
def test_a_cross_encoder_has_the_activation_beside_its_modules(activation, problem, expected, tmp_path: Path) -> None:
    oracle = save(tmp_path, "BertForSequenceClassification", BERT | {"num_labels": 1, "problem_type": problem})
    write_cross_encoder(tmp_path, activation)
    with run(tmp_path) as llm, torch.no_grad():
        (output,) = llm.classify(TEXTS[0], use_tqdm=False)
        np.testing.assert_allclose(output.outputs.probs, expected(oracle(ids_of(TEXTS[0])).logits[0]), atol=1e-5)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize(("kind", "way"), [("BertModel", "mean"), ("Qwen3Model", "lasttoken")])
def test_a_cross_encoder_may_be_modules(kind: str, way: str, num_labels: int, tmp_path: Path) -> None:
    oracle = save(tmp_path, kind, BERT if kind == "BertModel" else LLAMA | {"head_dim": 8})
    write_modules(tmp_path, {"pooling_mode": way}, "Dense")
    write_cross_encoder(tmp_path, "activation.Sigmoid")
    linear = torch.nn.Linear(32, num_labels)
    (dense := tmp_path / "2_Dense").mkdir()
    save_file({"linear.weight": linear.weight.data, "linear.bias": linear.bias.data}, dense / "model.safetensors")
    names = {"activation_function": "torch.nn.Identity", "module_output_name": "scores"}
    (dense / "config.json").write_text(json.dumps({"in_features": 32, "out_features": num_labels, **names}))
    with run(tmp_path) as llm, torch.no_grad():
        assert llm.engine.pooler.tasks == (("classify", "score") if num_labels == 1 else ("classify",))
        for text, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            rows = oracle(ids_of(text)).last_hidden_state[0]
            logits = linear(rows.mean(0) if way == "mean" else rows[-1])
            np.testing.assert_allclose(output.outputs.probs, logits.sigmoid(), atol=1e-4)
        raw = PoolingParams(use_activation=False)
        (output,) = llm.classify(TEXTS[-1:], pooling_params=raw, use_tqdm=False)
        np.testing.assert_allclose(output.outputs.probs, logits, atol=1e-4)
        if num_labels == 1:
            (output,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
            types = torch.tensor([[0] * 5 + [1] * 2]) if kind == "BertModel" else None
            joined = torch.cat([ids_of(TEXTS[0]), ids_of(TEXTS[1])[:, 1:]], dim=1)
            given = {} if types is None else {"token_type_ids": types}
            rows = oracle(joined, **given).last_hidden_state[0]
            logits = linear(rows.mean(0) if way == "mean" else rows[-1])
            assert output.outputs.score == pytest.approx(float(logits.sigmoid()), abs=1e-4)


def test_what_is_not_run_is_named(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", BERT)
    with (
        pytest.raises(UnsupportedModelError, match=r"'JinaBertForMaskedLM' is not supported.*, and code that comes"),
        run(tmp_path, hf_overrides={"architectures": ["JinaBertForMaskedLM"], "auto_map": {"AutoModel": "a.B"}}),
    ):
        pass
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, "Dense")
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text('{"in_features": 32, "out_features": 8}')
    (tmp_path / "2_Dense" / "pytorch_model.bin").touch()
    with (
        pytest.raises(CheckpointError, match=r"2_Dense has no model\.safetensors; pickles .* are never read"),
        run(tmp_path),
    ):
        pass
    modules = (tmp_path / "modules.json").read_text().replace("sentence_transformers.models.Dense", "custom.Evil")
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(UnsupportedModelError, match=r"custom\.Evil' is not supported.*never run"), run(tmp_path):
        pass
