"""Folders of sentence-transformers: what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.sentence_transformers import (
    DenseModule,
    NormModule,
    SentenceConfig,
    SentenceModules,
    read_modules,
    read_sentence_config,
    weights_folder,
)

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
    steps = DenseModule(8, 4, True, None, tmp_path / "2_Dense"), NormModule(4, tmp_path / "3_LayerNorm")
    assert read_modules(tmp_path, 8) == SentenceModules(("mean",), steps, True)
    assert [weights_folder(step) for step in steps] == [tmp_path / "2_Dense", tmp_path / "3_LayerNorm"]


MODES = {"first": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "sum_by_root": "mean_sqrt_len_tokens"}
MODES |= {"weighted_mean": "weightedmean_tokens", "last": "lasttoken"}


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        *(({f"pooling_mode_{name}": True}, (mode,)) for mode, name in MODES.items()),
        ({f"pooling_mode_{name}": True for name in MODES.values()}, tuple(MODES)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True}, ("last",)),
        ({"pooling_mode": ["weightedmean", "cls"], "include_prompt": True}, ("weighted_mean", "first")),
        ({"pooling_mode": ["max", "mean_sqrt_len_tokens"]}, ("max", "sum_by_root")),
        ({"pooling_mode": ["mean", "mean"]}, ("mean", "mean")),
    ],
)
def test_ways_to_pool(config, modes, tmp_path: Path) -> None:
    dense = (f"{TYPE}Dense", "d", DENSE | {"in_features": 8 * len(modes)})
    write(tmp_path, FIRST, (f"{TYPE}Pooling", "p", config), dense)
    found = read_modules(tmp_path, 8)
    assert found is not None
    assert (found.modes, found.normalizes) == (modes, False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("tanh", True)),
        ({"bias": False, "activation_function": "torch.nn.GELU"}, ("gelu", False)),
        ({"activation_function": "torch.nn.modules.linear.Identity"}, (None, True)),
        ({"activation_function": "torch.nn.modules.activation.Sigmoid"}, ("sigmoid", True)),
        ({"activation_function": "torch.nn.ReLU", "use_residual": False}, ("relu", True)),
        ({"activation_function": "torch.nn.SiLU"}, ("silu", True)),
    ],
)
def test_a_dense_layer_has_an_activation_and_may_have_a_bias(config, expected, tmp_path: Path) -> None:
    write(tmp_path, FIRST, POOL, (f"{TYPE}Dense", "d", {"in_features": 8, "out_features": 4} | config))
    found = read_modules(tmp_path, 8)
    assert found is not None
    assert [(step.activation, step.has_bias) for step in found.steps if isinstance(step, DenseModule)] == [expected]


def test_vectors_of_tokens_have_length_1(tmp_path: Path) -> None:
    first = {key: value for key, value in zip(("type", "path"), FIRST, strict=False) if value}
    dense = {"path": "d", "type": "pylate.models.Dense.Dense"}
    write(tmp_path, FIRST, (dense["type"], "d", DENSE), (dense["type"], "e", DENSE | {"in_features": 4}))
    (tmp_path / "modules.json").write_text(json.dumps([first, dense, dense | {"path": "e"}]))
    steps = tuple(DenseModule(width, 4, True, None, tmp_path / name) for width, name in ((8, "d"), (4, "e")))
    assert read_modules(tmp_path, 8) == SentenceModules((), steps, True)


def test_the_newer_names_of_ways_to_pool(tmp_path: Path) -> None:
    write(tmp_path, FIRST, (f"{TYPE}Pooling", "1_Pooling", {"embedding_dimension": 8, "pooling_mode": ["cls", "mean"]}))
    found = read_modules(tmp_path, 8)
    assert found is not None
    assert found.modes == ("first", "mean")


@pytest.mark.parametrize(
    ("modules", "error", "words"),
    [
        ([], CheckpointError, r"modules\.json must list 1 to 16 modules, each"),
        ([FIRST] * 17, CheckpointError, "must list 1 to 16 modules"),
        ([FIRST] * 16, UnsupportedModelError, "module 1: Transformer as module 1: the first one is the Transformer"),
        (
            [("custom.Code", "", None)],
            UnsupportedModelError,
            r"modules\.json: module 0: the module 'custom\.Code' is not supported: sentence_transformers' Transformer, "
            "Pooling, Dense, LayerNorm, Normalize are, .* never run",
        ),
        ([("a.Dense", "", None)], UnsupportedModelError, "module 'a.Dense' is not supported"),
        ([(f"{TYPE}WordWeights", "", None)], UnsupportedModelError, "WordWeights' is not supported"),
        ([("x" * 99, "", None)], UnsupportedModelError, f"the module '{'x' * 80}' is"),
        ([FIRST, (f"{TYPE}Pooling", "/" * 99, None)], CheckpointError, f"module 1: 'path' is '{'/' * 80}', but must"),
        ([FIRST, (f"{TYPE}Dense", "", DENSE)], CheckpointError, "'path' is '', but must be the name of a folder"),
        ([FIRST, (f"{TYPE}Dense", "d", DENSE), POOL], CheckpointError, "pools vectors of 8, but must pool once"),
        (
            [FIRST, (f"{TYPE}Pooling", "p", POOLING | {"pooling_mode": 1})],
            CheckpointError,
            "'pooling_mode' has 1: ",
        ),
        (
            [FIRST, (f"{TYPE}Pooling", "p", {"pooling_mode": {"cls": 1}})],
            CheckpointError,
            r"p/config.json: 'pooling_mode' has {'cls': 1}: supported are cls, max, mean, mean_sqrt_len_tokens",
        ),
        (
            [FIRST, POOL, (f"{TYPE}Dense", "d", DENSE | {"use_residual": True})],
            UnsupportedModelError,
            "d/config.json: 'use_residual' is true: not supported",
        ),
        (
            [FIRST, POOL, (f"{TYPE}LayerNorm", "n", {"dimension": 9})],
            CheckpointError,
            "n/config.json: takes vectors of 9",
        ),
        (
            [FIRST, POOL, (f"{TYPE}Dense", "d", DENSE), (f"{TYPE}Dense", "e", DENSE)],
            CheckpointError,
            "e/config.json: takes vectors of 8, but gets 4, before they are normalized",
        ),
        (
            [FIRST, POOL, (f"{TYPE}Normalize", "", None), (f"{TYPE}Dense", "d", DENSE)],
            CheckpointError,
            "takes vectors of 8, but gets 8, before they are normalized",
        ),
        ([FIRST, POOL, (f"{TYPE}LayerNorm", "n", {})], CheckpointError, "n/config.json has no 'dimension'"),
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
            "d/config.json: 'activation_function' is 'os.system', supported are torch.nn's Identity, Tanh",
        ),
        (
            [FIRST, POOL, (f"{TYPE}Dense", "d", DENSE | {"activation_function": f"torch.nn.{'x' * 99}"})],
            UnsupportedModelError,
            f"is 'torch.nn.{'x' * 71}', supported",
        ),
        (
            [FIRST, POOL, (f"{TYPE}Dense", "d", DENSE | {"activation_function": "os.GELU"})],
            UnsupportedModelError,
            "is 'os.GELU', supported",
        ),
    ],
    ids=range(29),
)
def test_modules_that_are_refused(modules, error, words, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        read_modules(write(tmp_path, *modules), 8)


SCORES = DENSE | {"module_input_name": "sentence_embedding", "module_output_name": "scores"}


def write_cross_encoder(folder: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> Path:
    """As `write`, and the file that says what the modules are for."""
    config = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    return write(folder, *modules)


def test_the_last_module_of_a_cross_encoder_makes_scores(tmp_path: Path) -> None:
    found = read_modules(write_cross_encoder(tmp_path, FIRST, POOL, (f"{TYPE}Dense", "d", SCORES)), 8)
    assert found == SentenceModules(("mean",), (DenseModule(8, 4, True, None, tmp_path / "d"),), False, 4)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ([FIRST], "modules.json: a CrossEncoder must end with a Dense whose output is 'scores'"),
        ([FIRST, POOL, (f"{TYPE}Dense", "d", DENSE)], "a CrossEncoder must end with a Dense"),
        ([FIRST, (f"{TYPE}Dense", "d", SCORES)], "d/config.json: a Dense from 'sentence_embedding' to 'scores' is"),
        (
            [FIRST, POOL, (f"{TYPE}Dense", "d", SCORES), (f"{TYPE}Dense", "e", DENSE | {"in_features": 4})],
            "a CrossEncoder must end with a Dense",
        ),
        ([FIRST, POOL, (f"{TYPE}Dense", "d", SCORES), (f"{TYPE}Normalize", "", None)], "a CrossEncoder must end"),
    ],
    ids=range(5),
)
def test_other_modules_of_cross_encoders_are_refused(modules, words, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_modules(write_cross_encoder(tmp_path, *modules), 8)


@pytest.mark.parametrize(
    "names",
    [("sentence_embedding", "scores"), ("sentence_embedding", "other"), ("token_embeddings", "token_embeddings")],
)
def test_an_embedding_goes_through_every_dense_layer(names, tmp_path: Path) -> None:
    config = DENSE | dict(zip(("module_input_name", "module_output_name"), names, strict=True))
    words = rf"d/config\.json: a Dense from '{names[0]}' to '{names[1]}' is not"
    with pytest.raises(UnsupportedModelError, match=words):
        read_modules(write(tmp_path, FIRST, POOL, (f"{TYPE}Dense", "d", config)), 8)


def test_modules_are_objects_with_a_type(tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    for text, words in (("[1]", "must list 1 to 16 modules, each an object"), ("[{}]", "module 0 has no 'type'")):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            read_modules(tmp_path, 8)


def test_modules_without_weights_are_refused(tmp_path: Path) -> None:
    modules = read_modules(write(tmp_path, FIRST, POOL, (f"{TYPE}Dense", "d", DENSE)), 8)
    assert modules is not None
    with pytest.raises(CheckpointError, match="pickles"):
        weights_folder(modules.steps[0])


def test_what_a_model_was_made_for(tmp_path: Path) -> None:
    assert read_sentence_config(tmp_path / "model.gguf") == SentenceConfig(None, False, {})
    assert read_sentence_config(tmp_path) == SentenceConfig(None, False, {})
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 512}')
    assert read_sentence_config(tmp_path) == SentenceConfig(512, False, {})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": true}')
    prompts = {"query": "find: ", **{str(i): "" for i in range(1023)}}
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    assert read_sentence_config(tmp_path) == SentenceConfig(256, True, prompts)
    path.write_text('{"prompts": {"query": null, "document": "d: "}, "default_prompt_name": "other"}')
    assert read_sentence_config(tmp_path) == SentenceConfig(256, True, {"document": "d: "})
    path.write_text('{"prompts": null}')
    assert read_sentence_config(tmp_path) == SentenceConfig(256, True, {})


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (
            "config_sentence_transformers",
            '{"prompts": ["a"]}',
            "json: 'prompts' must be an object of at most 1024 texts",
        ),
        ("config_sentence_transformers", '{"prompts": {"a": "b", "c": 1}}', "json: 'prompts' must be an object of"),
        (
            "config_sentence_transformers",
            json.dumps({"prompts": {str(i): "" for i in range(1025)}}),
            "json: 'prompts' must be an object of at most 1024 texts",
        ),
        ("sentence_bert_config", '{"max_seq_length": 0}', "json: 'max_seq_length' is 0, but must be an integer"),
        ("sentence_bert_config", '{"do_lower_case": 0}', "json: 'do_lower_case' is 0, but must be true or false"),
        ("sentence_bert_config", "[]", "json holds a JSON list, but must hold an object"),
    ],
    ids=range(6),
)
def test_files_beside_the_model_that_are_malformed(file: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / f"{file}.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"/{file}\.{words}"):
        read_sentence_config(tmp_path)
