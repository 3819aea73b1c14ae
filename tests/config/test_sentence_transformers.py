"""Folders of sentence-transformers: what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.sentence_transformers import read_modules, read_sentence_config, weights_folder

TYPE = "sentence_transformers.models."
POOLING = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
DENSE = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": "torch.nn.modules.linear.Identity"}


def write(folder: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> Path:
    """A folder whose modules have these types, folders and configs."""
    entries = [{"idx": i, "path": where, "type": kind} for i, (kind, where, _) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    for _, where, config in modules:
        if config is not None:
            (folder / where).mkdir(exist_ok=True)
            (folder / where / "config.json").write_text(json.dumps(config))
    return folder


FIRST = (f"{TYPE}Transformer", "", None)
POOL = (f"{TYPE}Pooling", "1_Pooling", POOLING)


def test_modules_in_their_order(tmp_path: Path) -> None:
    assert read_modules(tmp_path, 8) is None
    assert read_modules(tmp_path / "model.gguf", 8) is None
    dense, norm = (f"{TYPE}Dense", "2_Dense", DENSE), (f"{TYPE}LayerNorm", "3_LayerNorm", {"dimension": 4})
    write(tmp_path, FIRST, POOL, dense, norm, (f"{TYPE}Normalize", "4_Normalize", None))
    for name in ("2_Dense", "3_LayerNorm"):
        (tmp_path / name / "model.safetensors").touch()
    found = read_modules(tmp_path, 8)
    assert found is not None
    assert (found.modes, len(found.steps), found.normalizes) == (("mean",), 2, True)
    assert found.steps[0].activation is None


def test_the_newer_names_of_ways_to_pool(tmp_path: Path) -> None:
    write(tmp_path, FIRST, (f"{TYPE}Pooling", "1_Pooling", {"embedding_dimension": 8, "pooling_mode": ["cls", "mean"]}))
    found = read_modules(tmp_path, 8)
    assert found is not None
    assert found.modes == ("first", "mean")


@pytest.mark.parametrize(
    ("modules", "error", "words"),
    [
        ([], CheckpointError, "must list 1 to"),
        ([("custom.Code", "", None)], UnsupportedModelError, "never run"),
        ([POOL], UnsupportedModelError, "the first one is the Transformer"),
        ([FIRST, FIRST], UnsupportedModelError, "the first one is the Transformer"),
        ([(f"{TYPE}Transformer", "0_Transformer", None)], UnsupportedModelError, "not in a folder"),
        ([FIRST, (f"{TYPE}Pooling", "../x", None)], CheckpointError, "name of a folder beside it"),
        ([FIRST, (f"{TYPE}Pooling", "p", POOLING | {"word_embedding_dimension": 9})], CheckpointError, "vectors of 9"),
        ([FIRST, POOL, POOL], CheckpointError, "must pool once"),
        (
            [FIRST, (f"{TYPE}Pooling", "p", POOLING | {"include_prompt": False})],
            UnsupportedModelError,
            "include_prompt",
        ),
        ([FIRST, (f"{TYPE}Pooling", "p", {"word_embedding_dimension": 8})], CheckpointError, "no pooling mode"),
        ([FIRST, POOL, (f"{TYPE}Dense", "d", DENSE | {"in_features": 9})], CheckpointError, "takes vectors of 9"),
        (
            [FIRST, POOL, (f"{TYPE}Dense", "d", DENSE | {"activation_function": "os.system"})],
            UnsupportedModelError,
            "os.system",
        ),
    ],
)
def test_modules_that_are_refused(modules, error, words, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        read_modules(write(tmp_path, *modules), 8)


def test_modules_without_weights_are_refused(tmp_path: Path) -> None:
    modules = read_modules(write(tmp_path, FIRST, POOL, (f"{TYPE}Dense", "d", DENSE)), 8)
    assert modules is not None
    with pytest.raises(CheckpointError, match="pickles"):
        weights_folder(modules.steps[0])


def test_what_a_model_was_made_for(tmp_path: Path) -> None:
    assert read_sentence_config(tmp_path / "model.gguf").max_seq_length is None
    assert read_sentence_config(tmp_path).prompts == {}
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": true}')
    prompts = tmp_path / "config_sentence_transformers.json"
    prompts.write_text('{"prompts": {"query": "find: "}, "default_prompt_name": "query"}')
    found = read_sentence_config(tmp_path)
    assert (found.max_seq_length, found.do_lower_case, found.default_prompt_name) == (256, True, "query")
    for text, words in (
        ('{"prompts": ["a"]}', "must be an object"),
        ('{"default_prompt_name": "x"}', "there are prompts"),
    ):
        prompts.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            read_sentence_config(tmp_path)
