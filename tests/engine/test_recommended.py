"""What requests take from a checkpoint's files is checked before its weights are read."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from quire import LLM
from quire.common.errors import CheckpointError, TokenizerError
from quire.config.model import ModelConfig
from quire.engine import llm_engine
from quire.engine.requests.recommended import tokenizer_of

SMALL = {"hf_overrides": {"vocab_size": 8000}}
"""Of the embedded model, whose tokenizer has 8192 tokens."""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The embedded model's tokenizer in a folder of its own, with one more token."""
    path = Path(ModelConfig.resolve(None).path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path / name, tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(["<added>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_that_fits_is_read_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert tokenizer_of(ModelConfig.resolve(None)).vocab_size == 8192
    assert not caplog.records


def test_a_tokenizer_trained_with_more_tokens_than_its_model_has_is_refused() -> None:
    with pytest.raises(
        TokenizerError, match=r"a tokenizer of 8192 tokens and a model whose 'vocab_size' is 8000: they"
    ):
        tokenizer_of(ModelConfig.resolve(None, **SMALL))


@pytest.mark.parametrize("overrides", [{}, SMALL])
def test_added_tokens_and_tokenizers_that_callers_name_may_have_larger_ids(
    copied: Path, overrides: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelConfig.resolve(None, tokenizer=copied, **overrides)
    with caplog.at_level(logging.WARNING):
        assert tokenizer_of(model).vocab_size == 8193
    assert f"{copied} has 8193 tokens, and the model {model.vocab_size}: texts with the other" in caplog.text


def test_an_added_token_in_the_models_own_folder_is_allowed(copied: Path) -> None:
    source = ModelConfig.resolve(None).path
    (copied / "config.json").write_bytes((source / "config.json").read_bytes())
    assert tokenizer_of(ModelConfig.resolve(copied)).vocab_size == 8193


def test_wrong_recommendations_are_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_engine, "make_executor", lambda *_: pytest.fail("weights are read here"))
    with pytest.raises(CheckpointError, match="temperature='hot': must be 0 for greedy"):
        LLM(override_generation_config={"temperature": "hot"}, num_gpu_blocks_override=8)
