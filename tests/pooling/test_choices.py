"""Ways of pooling, activations and tasks that the caller chooses, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from quire import ConfigError, PoolingParams
from tests.models.encoders import BERT

from .test_encoders import LLAMA, TEXTS, ids_of, run, save, write_modules

WAYS = {"CLS": lambda rows: rows[0], "LAST": lambda rows: rows[-1], "MEAN": lambda rows: rows.mean(0)}


@pytest.mark.parametrize("has_modules", [False, True])
@pytest.mark.parametrize("kind", ["BertModel", "Qwen3Model"])
@pytest.mark.parametrize("way", WAYS)
def test_an_embedding_is_made_of_the_hidden_states_that_are_chosen(
    way: str, kind: str, has_modules: bool, tmp_path: Path
) -> None:
    oracle = save(tmp_path, kind, BERT if kind == "BertModel" else LLAMA | {"head_dim": 8})
    if has_modules:
        write_modules(tmp_path, {"pooling_mode_max_tokens": True}, "Normalize")
    with run(tmp_path, pooler_config={"pooling_type": way}) as llm, torch.no_grad():
        for text, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            row = WAYS[way](oracle(ids_of(text)).last_hidden_state[0])
            np.testing.assert_allclose(output.outputs.data, normalize(row, dim=0), atol=1e-4)


def test_requests_that_leave_it_open_get_what_is_chosen(tmp_path: Path) -> None:
    oracle = save(tmp_path, "BertModel", BERT)
    with run(tmp_path, pooler_config={"use_activation": False, "task": "token_embed"}) as llm, torch.no_grad():
        assert llm.engine.pooler.tasks == ("token_embed", "embed")
        rows = oracle(ids_of(TEXTS[0])).last_hidden_state[0]
        (of_tokens,) = llm.encode(TEXTS[0], use_tqdm=False)
        np.testing.assert_allclose(of_tokens.outputs.data, rows, atol=1e-4)
        (raw,) = llm.embed(TEXTS[0], use_tqdm=False)
        np.testing.assert_allclose(raw.outputs.data, rows.mean(0), atol=1e-4)
        for asked in (PoolingParams(use_activation=True), PoolingParams(normalize=True)):
            (unit,) = llm.embed(TEXTS[0], pooling_params=asked, use_tqdm=False)
            np.testing.assert_allclose(unit.outputs.data, normalize(rows.mean(0), dim=0), atol=1e-4)


def test_a_classifier_reads_the_hidden_state_that_is_chosen(tmp_path: Path) -> None:
    oracle = save(tmp_path, "DistilBertForSequenceClassification", {
        "vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "initializer_range": 0.3,
        "max_position_embeddings": 64, "num_labels": 3,
    })  # fmt: skip
    chosen = {"seq_pooling_type": "LAST", "use_activation": False}
    with run(tmp_path, pooler_config=chosen) as llm, torch.no_grad():
        for text, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            row = oracle.distilbert(ids_of(text)).last_hidden_state[0, -1]
            expected = oracle.classifier(oracle.pre_classifier(row).relu())
            np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "pooling", "chosen", "words"),
    [
        ("BertModel", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "CLS", "no pooling_type"),
        ("BertForTokenClassification", None, "CLS", "no pooling_type"),
        ("BertModel", None, "classify", r"task='classify' \(allowed: embed, token_embed\)"),
    ],
)
def test_choices_that_a_model_does_not_have(
    kind: str, pooling: dict[str, Any] | None, chosen: str, words: str, tmp_path: Path
) -> None:
    save(tmp_path, kind, BERT)
    if pooling is not None:
        write_modules(tmp_path, pooling)
    name = "pooling_type" if chosen.isupper() else "task"
    with pytest.raises(ConfigError, match=f"^pooler_config.*{words}"), run(tmp_path, pooler_config={name: chosen}):
        pass
