"""Requests for embeddings, and checkpoints that pool, from strangers: one clear error, before work begins."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, EngineArgs, LLMEngine, PoolingParams
from quire.common.errors import CheckpointError, OutOfMemoryError
from tests.hostile.test_checkpoints import Payload
from tests.models.encoders import BERT, DEBERTA, DEBERTA_V3
from tests.pooling.test_encoders import run, save
from tests.server.in_process import Server, serve

EMBED, GOOD = "/v1/embeddings", {"input": "json.dumps"}


@pytest.fixture(scope="module")
def server() -> Server:
    engine = LLMEngine.from_args(EngineArgs(runner="pooling", num_gpu_blocks_override=64, max_model_len=128))
    return serve(engine)


ASKED: dict[str, tuple[str, Any, str]] = {
    "100,000 texts": (EMBED, {"input": ["a"] * 100_000}, "100,000 texts; at most 2,048 are allowed"),
    "100,000 documents": ("/rerank", {"query": "a", "documents": ["b"] * 100_000}, "100,000 texts"),
    "100,000 pairs": ("/score", {"text_1": "a", "text_2": ["b"] * 100_000}, "100,000 texts"),
    "an empty text": (EMBED, {"input": ""}, "empty"),
    "an empty text among others": (EMBED, {"input": ["a", ""]}, r"input\[1\].*empty"),
    "no token ids": (EMBED, {"input": [[]]}, "empty"),
    "lists in lists": (EMBED, {"input": [[[1]]]}, "input"),
    "ids that are no ids": (EMBED, {"input": [[1.5, True]]}, "input"),
    "ids beyond the vocabulary": (EMBED, {"input": [[2**63]]}, "input|64 bits|out of range"),
    "half of a surrogate pair": (EMBED, b'{"input": "a\\ud800"}', "surrogate|UTF|utf"),
    "a text that is too long": (EMBED, {"input": "b " * 500}, "tokens, and the model takes 128: shorten it"),
    "a megabyte": (EMBED, {"input": "b" * 2**20}, "128"),
    "a pair that is too long": ("/score", {"text_1": "b " * 100, "text_2": "c " * 200}, "the model takes 128"),
    "no dimensions": (EMBED, GOOD | {"dimensions": 0}, "dimensions=0"),
    "dimensions below none": (EMBED, GOOD | {"dimensions": -1}, "dimensions=-1"),
    "more dimensions than there are": (EMBED, GOOD | {"dimensions": 257}, "dimensions=257: must be 256"),
    "dimensions without end": (EMBED, GOOD | {"dimensions": 10**40}, "dimensions|64 bits|out of range"),
    "half a dimension": (EMBED, GOOD | {"dimensions": 1.5}, "dimensions|int"),
    "dimensions in words": (EMBED, GOOD | {"dimensions": "8"}, "dimensions|int"),
    "dimensions that are true": (EMBED, GOOD | {"dimensions": True}, "dimensions|int"),
    "dimensions that are no number": (EMBED, b'{"input": "a", "dimensions": NaN}', "JSON|malformed"),
    "cut to nothing": (EMBED, GOOD | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
    "cut to less than nothing": (EMBED, GOOD | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2"),
    "cut to more than the model takes": (EMBED, GOOD | {"truncate_prompt_tokens": 129}, "takes at most 128"),
    "classes of an embedder": ("/classify", GOOD, "this endpoint needs classify"),
    "a task of another model": ("/pooling", GOOD | {"task": "token_classify"}, "has the tasks embed"),
    "ids below the vocabulary": (EMBED, {"input": [[-1]]}, "token id -1 is not one of"),
    "no ids among texts": (EMBED, {"input": ["a", []]}, r"input\[1\].*empty"),
    "nothing": (EMBED, {"input": None}, "input"),
    "a list of nothing": (EMBED, {"input": [None]}, r"input\[0\]"),
    "100,000 lists of ids": (EMBED, {"input": [[1]] * 100_000}, "100,000 texts"),
    "more ids than the model takes": (EMBED, {"input": [7] * 200_000}, "200000 tokens"),
    "no texts for Cohere": ("/v2/embed", {"texts": []}, "texts must not be empty"),
    "no tokens for Cohere": ("/v2/embed", {"texts": ["a"], "max_tokens": 0}, "max_tokens=0"),
    "integers for Cohere": ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, r"embedding_types\[0\]"),
    "one side twice": ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "exactly one of text_1"),
    "documents that are a number": ("/rerank", {"query": "a", "documents": 7}, "documents: expected"),
    "one document without tokens": ("/rerank", {"query": "a", "documents": ""}, r"documents\[0\].*empty|empty"),
    "no tokens of a query": ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_query": 0}, "per_query=0"),
    "cut in the middle": (EMBED, GOOD | {"truncation_side": "middle"}, "truncation_side: .*left, right"),
    "a type of input that nobody has": ("/v2/embed", {"texts": ["a"], "input_type": "x" * 9999}, "input_type='xxx"),
    "documents without text": ("/rerank", {"query": "a", "documents": [{"x": 1}]}, r"documents\[0\]"),
    "a template that was not allowed": (
        "/rerank",
        {"query": "a", "documents": ["b"], "chat_template": "x"},
        "template",
    ),
    "a longer salt than allowed": (EMBED, GOOD | {"cache_salt": "x" * 10**5}, "cache_salt"),
    "text of an embedder": ("/v1/completions", {"prompt": "a"}, "cannot generate: send the text to /v1/embeddings or"),
    "a chat with an embedder": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "cannot gen"),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_request_is_refused_and_the_next_has_the_same_bits(server: Server, case: str) -> None:
    path, body, words = ASKED[case]
    song = server.post(EMBED, GOOD).json["data"]
    answer = server.post(path, body)
    assert answer.status == 400, answer.body
    message = (answer.json if path == "/v2/embed" else answer.error)["message"]
    assert len(message) < 4000
    with pytest.raises(ValueError, match=f"(?s){words}"):
        raise ValueError(message)
    engine = server.llm.engine
    assert not engine.has_unfinished_requests()
    engine.requests.check_integrity()
    assert engine.stats().num_used_blocks == 0
    assert server.post(EMBED, GOOD).json["data"] == song


def test_a_text_that_is_too_long_is_cut_if_asked(server: Server) -> None:
    for keep in (-1, 1, 128):
        answer = server.post(EMBED, {"input": "b " * 50_000, "truncate_prompt_tokens": keep})
        assert answer.status == 200, answer.body


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoders")
    save(made / "bert", "BertModel", BERT)
    save(made / "deberta", "DebertaV2Model", DEBERTA | DEBERTA_V3)
    return made


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "config.json", values)


def rewrite(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def modules(*entries: Any, files: dict[str, Any] | None = None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "modules.json").write_text(json.dumps(list(entries)))
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                (folder / name).write_text(json.dumps(content))

    return write


def pickled_heads(folder: Path) -> None:
    config(architectures=["BgeM3EmbeddingModel"], pad_token_id=0)(folder)
    for name in "colbert_linear.pt", "sparse_linear.pt":
        (folder / name).write_bytes(pickle.dumps(Payload(folder / "RAN")))


def kind(name: str, path: str = "1_M", package: str = "sentence_transformers.models") -> dict[str, Any]:
    return {"idx": 1, "name": "1", "path": path, "type": f"{package}.{name}"}


MODEL = kind("Transformer", "")
POOLING, MEAN = kind("Pooling"), {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
POOLED = {"1_M/config.json": MEAN}
LARGE = "do not fit into this machine|wrong shape"
DENSE = {"in_features": 32, "out_features": 8, "bias": False}


def dense(**values: Any) -> Callable[[Path], None]:
    files = POOLED | {"2_D/config.json": DENSE | values, "2_D/model.safetensors": b"\x08\0\0\0\0\0\0\0{}      "}
    return modules(MODEL, POOLING, kind("Dense", "2_D"), files=files)


SPOILT: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a module that is code": ("bert", modules(MODEL, kind("system", package="os")), "never run"),
    "a module of its own": ("bert", modules(MODEL, kind("Model", package="custom_code")), "never run"),
    "code that looks like a module": (
        "bert", modules(MODEL, kind("Pooling", package="sentence_transformers.models;import os")), "never run",
    ),
    "a module outside": ("bert", modules(MODEL, kind("Pooling", "../../etc")), "must be the name of a folder"),
    "a module at the root": ("bert", modules(MODEL, kind("Pooling", "/etc")), "must be the name of a folder"),
    "no modules": ("bert", modules(), "must list 1 to 16 modules"),
    "too many modules": ("bert", modules(*[MODEL] * 100_000), "must list 1 to 16 modules"),
    "modules that are texts": ("bert", modules("Pooling"), "must list 1 to 16 modules"),
    "a model in a folder": ("bert", modules(kind("Transformer", "0_Transformer")), "must be beside"),
    "two poolings": ("bert", modules(MODEL, POOLING, POOLING, files=POOLED), "must pool once"),
    "pooling of another width": (
        "bert",
        modules(MODEL, POOLING, files={"1_M/config.json": MEAN | {"word_embedding_dimension": 64}}),
        "pools vectors of 64",
    ),
    "a pickled layer": (
        "bert",
        modules(
            MODEL, POOLING, kind("Dense", "2_D"),
            files=POOLED | {"2_D/config.json": DENSE, "2_D/pytorch_model.bin": pickle.dumps(Payload(Path("RAN")))},
        ),
        "pickles .* are never read",
    ),
    "a layer of terabytes": ("bert", dense(out_features=2**31 - 1), LARGE),
    "a layer that does not fit": ("bert", dense(in_features=31), "takes vectors of 31, but gets 32"),
    "an activation that is code": ("bert", dense(activation_function="os.system"), "supported are torch.nn's"),
    "a length of no tokens": (
        "bert",
        lambda folder: (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 0}'),
        "max_seq_length",
    ),
    "prompts that are numbers": (
        "bert",
        lambda folder: (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": 5}}'),
        "'prompts' must be",
    ),
    "pickled heads": ("bert", pickled_heads, r"colbert_linear\.pt, a pickle"),
    "buckets without end": ("deberta", config(position_buckets=2**31 - 1), LARGE),
    "buckets below none": ("deberta", config(position_buckets=-5), "position_buckets"),
    "distances without end": ("deberta", config(position_buckets=-1, max_relative_positions=2**31 - 1), LARGE),
    "terms that are code": ("deberta", config(pos_att_type="c2p|__import__"), "supported are c2p and p2c"),
    "terms that are a number": ("deberta", config(pos_att_type=5), "pos_att_type"),
    "positions without end": ("deberta", config(max_position_embeddings=2**31 - 1), LARGE),
    "a convolution": ("deberta", config(conv_kernel_size=3), "conv_kernel_size"),
    "a projection of tables": ("deberta", config(embedding_size=16), "embedding_size"),
    "projections of distances": ("deberta", config(share_att_key=False), "share_att_key"),
    "matryoshka sizes in words": ("bert", config(matryoshka_dimensions="all"), "matryoshka_dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_checkpoint_that_pools_is_refused_in_a_line(encoders: Path, name: str, tmp_path: Path) -> None:
    source, spoil, words = SPOILT[name]
    folder = tmp_path / "checkpoint"
    shutil.copytree(encoders / source, folder)
    spoil(folder)
    with pytest.raises((CheckpointError, OutOfMemoryError), match=words) as caught:
        LLM(str(folder), num_threads=1)
    assert len(str(caught.value)) < 4000
    assert not (folder / "RAN").exists()
    assert not Path("RAN").exists(), "code of the checkpoint was run"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_fail_the_texts_that_meet_them(
    encoders: Path, number: float, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(encoders / "bert", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][7] = torch.tensor(number)
    save_file(tensors, folder / "model.safetensors")
    with run(encoders / "bert") as llm:
        expected = [output.outputs.data for output in llm.embed([[2, 8, 3], [2, 9, 3]], use_tqdm=False)]
    with run(folder) as llm:
        fine, damaged, other = llm.embed([[2, 8, 3], [2, 7, 3], [2, 9, 3]], use_tqdm=False)
        assert "not finite" in damaged.error
        assert damaged.outputs.embedding == []
        assert np.array_equal(fine.outputs.data, expected[0])
        assert np.array_equal(other.outputs.data, expected[1])
        assert llm.embed([[2, 8, 3]], pooling_params=PoolingParams(), use_tqdm=False)[0].error is None
