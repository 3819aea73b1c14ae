"""What the line that a start logs says of the machine's limit: the bytes of a token, and how fast they are read."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import kernels
from quire.config.machine import allowed_cpus
from quire.config.model import ModelConfig
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import Projection
from quire.models.weights.loader import load_model
from quire.models.weights.reading import ReadingLimit, reading_limit
from tests.models.encoders import BERT
from tests.models.families import SMALL
from tests.models.mixtures import EXPERTS

RATE = 2e9


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the tensors that were read, of which each is as fast as the others."""
    found: list[list[int]] = []

    def reading_rate(_: Any, weights: Any) -> float:
        found.append([weight.nbytes for weight in weights])
        return RATE

    monkeypatch.setattr(type(kernels.backend_for("cpu")), "reading_rate", reading_rate)
    return found


def matrices(model: Any, kind: type, *names: str) -> int:
    """The bytes of the matrices of some layers."""
    layers = [(name, layer) for name, layer in model.weighted_layers() if isinstance(layer, kind)]
    data = [layer.table if isinstance(layer, Embedding) else layer.weight for name, layer in layers
            if any(part in name for part in names)]  # fmt: skip
    return sum(each.data.nbytes for each in data)


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_reads_all_matrices_and_the_head_but_no_table(
    tied: bool, save_checkpoint: Any, measured: list[list[int]]
) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL | {"tie_word_embeddings": tied})
    model = load_model(ModelConfig.resolve(folder))
    head = matrices(model, Embedding, "embed_tokens") if tied else matrices(model, Projection, "lm_head")
    limit = reading_limit(model)
    assert limit is not None
    assert limit == ReadingLimit(head + matrices(model, Projection, "layers."), RATE, is_generating=True)
    assert limit.num_bytes == sum(measured[-1])


def test_a_token_reads_its_experts(save_checkpoint: Any, measured: list[list[int]]) -> None:
    folder, _ = save_checkpoint("Qwen3MoeForCausalLM", **EXPERTS | {"head_dim": 16, "num_experts_per_tok": 2})
    model = load_model(ModelConfig.resolve(folder))
    limit = reading_limit(model)
    assert limit is not None
    experts = matrices(model, Projection, ".experts.")
    assert limit.num_bytes == sum(measured[-1]) - experts * 4 // 6, "two of six"


def test_texts_that_are_pooled_have_a_limit_too(save_checkpoint: Any) -> None:
    folder, _ = save_checkpoint("BertModel", **BERT)
    limit = reading_limit(load_model(ModelConfig.resolve(folder)))
    assert limit is not None
    assert not limit.is_generating


def test_what_stays_in_the_file_is_the_disks_matter(save_checkpoint: Any, measured: list[list[int]]) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    model: Any = load_model(ModelConfig.resolve(folder, quantization="int8"))
    measured.clear()
    projection = model.layers[0].mlp.down_proj
    projection.weight = replace(projection.weight, in_file=True)
    assert reading_limit(model) is None
    assert not measured


def test_the_line_of_the_start_says_it(save_checkpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = save_checkpoint("LlamaForCausalLM", **SMALL)
    with caplog.at_level(logging.INFO, "quire"):
        limit = reading_limit(load_model(ModelConfig.resolve(folder)))
    count = kernels.num_threads()
    assert re.search(f"to run with the kernels {kernels.isa()}.* on {count} threads?; {limit}", caplog.text)


def test_the_line_of_the_start_says_what_is_unusual(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_ISA", kernels.isa())
    cpus = len(allowed_cpus())
    with caplog.at_level(logging.INFO, "quire"), kernels.backend_for("cpu").threads(cpus + 1):
        load_model(ModelConfig.resolve(folder))
    said = f"{kernels.isa()} (QUIRE_ISA says so) on {cpus + 1} threads, more than the {cpus} CPUs that they share"
    assert said in caplog.text or kernels.isa() == "reference"


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            ReadingLimit(988_000_000, 21.34e9, is_generating=True),
            "a token reads 0.988 GB of weights, here at 21.3 GB/s: at most 22 tokens/s for one sequence without drafts",
        ),
        (
            ReadingLimit(140_000_000_000, 21.34e9, is_generating=True),
            "a token reads 140 GB of weights, here at 21.3 GB/s: at most 0.15 tokens/s for one sequence without drafts",
        ),
        (
            ReadingLimit(45_000_000, 21.34e9, is_generating=False),
            "a text reads 0.045 GB of weights, here at 21.3 GB/s: at most 474 texts/s one by one",
        ),
    ],
)
def test_the_words(limit: ReadingLimit, words: str) -> None:
    assert str(limit) == words


def test_without_a_measurement_the_line_names_the_kernels_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(type(kernels.backend_for("cpu")), "reading_rate", lambda *_: None)
    with caplog.at_level(logging.INFO, "quire"):
        load_model(ModelConfig.resolve(folder))
    assert re.search(rf"to run with the kernels {kernels.isa()}.* on \d+ threads?$", caplog.messages[-1])
