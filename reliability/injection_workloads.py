"""The requests of reliability.injections, and the models that pool."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.common.params import PoolingTask
from quire.config.checkpoint.location import EMBEDDED_CHECKPOINTS
from quire.config.model import ModelConfig

VOCAB = range(3, 8000)
Params = SamplingParams | BeamSearchParams | PoolingParams
Wish = tuple[str, Any, Params | None]
"""Request id, prompt and params. Without params, the prompt is a pair (context, continuation) to score."""
POOLING_TASKS: dict[str, tuple[PoolingTask, ...]] = {
    "embedding": ("embed", "embed", "token_embed"),
    "scoring": ("score", "classify"),
    "classifying": ("classify",),
}
"""What the models that pool make of texts. That which scores pools the last token, so that its texts run in chunks and
share prefixes. That which classifies attends in both directions, so that its texts run whole and keep nothing."""


def lift(output_token_ids: list[int], logits: Tensor) -> Tensor:
    """Change the logits, as a logits processor."""
    return logits + 0.5 * (len(output_token_ids) % 3)


def workload(number: int) -> list[Wish]:
    """Return five to eight requests of all kinds, always the same for one number."""
    rng = random.Random(f"workload {number}")
    common = rng.choices(VOCAB, k=rng.randint(4, 11))
    kinds = ["plain", "sampled", "samples", "beams", "grammar", "stop", "logprobs", "changed", "processed", "scored"]
    chosen = [*rng.sample(kinds, k=rng.randint(4, 7)), "plain"]
    wishes = list[Wish]()
    for place, kind in enumerate(chosen):
        own = rng.choices(VOCAB, k=rng.randint(1, 8))
        prompt: Any = common + own if rng.random() < 0.5 else own
        request_id = f"{place} {kind}"
        if kind == "stop" and rng.random() < 0.7:
            prompt = rng.choice(["def add(a, b):", "import os", "The list of"])
        wishes.append((request_id, (prompt, own) if kind == "scored" else prompt, _params(kind, rng)))
    return wishes


def pooling_workload(number: int, tasks: tuple[PoolingTask, ...]) -> list[Wish]:
    """Return five to eight requests for a model that pools, always the same for one number and these tasks."""
    rng = random.Random(f"pooling workload {number}")
    common = rng.choices(VOCAB, k=rng.randint(4, 11))
    wishes = list[Wish]()
    for place in range(rng.randint(5, 8)):
        own = rng.choices(VOCAB, k=rng.randint(1, 8))
        prompt: Any = rng.choice([common + own, own, "def add(a, b):", "import os"])
        task, flag = rng.choice(tasks), rng.choice([None, False])
        params = PoolingParams(task=task, use_activation=flag, tenant=rng.choice("ab"))
        wishes.append((f"{place} {task}", prompt, params))
    return wishes


def wishes_of(number: int, setup: str) -> list[Wish]:
    """The requests of a workload for engines of a configuration, which has the name of its model if that pools."""
    return pooling_workload(number, POOLING_TASKS[setup]) if setup in POOLING_TASKS else workload(number)


@cache
def pooling_checkpoint(name: str) -> str:
    """The model of POOLING_TASKS: the embedded one, or a folder with its weights and a head of random ones, which is
    removed when this process ends."""
    embedded = ModelConfig.resolve(EMBEDDED_CHECKPOINTS[0]).path
    if name == "embedding":
        return str(embedded)
    folder = Path(_folders().name) / name
    shutil.copytree(embedded, folder)
    num_labels = 1 if name == "scoring" else 3
    weights = load_file(folder / "model.safetensors")
    hidden_size = weights["model.embed_tokens.weight"].shape[1]
    head = torch.randn(num_labels, hidden_size, generator=torch.Generator().manual_seed(0)) / hidden_size**0.5
    save_file(weights | {"score.weight": head}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": num_labels}
    config |= {} if name == "scoring" else {"is_causal": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quire-injections-")


def _params(kind: str, rng: random.Random) -> SamplingParams | BeamSearchParams | None:
    length = rng.randint(2, 9)
    if kind == "scored":
        return None
    if kind == "beams":
        return BeamSearchParams(rng.randint(2, 3), min(length, 5))
    given: dict[str, dict[str, Any]] = {
        "plain": {"temperature": 0},
        "sampled": {"temperature": 0.9, "top_p": 0.9},
        "samples": {"n": rng.randint(2, 3)},
        "grammar": {
            "structured_outputs": StructuredOutputsParams(choice=[str(rng.randrange(10**6)), str(rng.randrange(99))])
        },
        "stop": {"stop": ["e", "("], "min_tokens": 1},
        "logprobs": {"logprobs": 2, "prompt_logprobs": rng.choice([None, 1])},
        "changed": {"frequency_penalty": 0.7, "bad_words": ["the", " a"], "logit_bias": {5: 1.0}},
        "processed": {"logits_processors": [lift]},
    }
    kept: dict[str, Any] = {"seed": rng.randrange(10**6), "max_tokens": length, "ignore_eos": kind != "grammar"}
    return SamplingParams(**kept, output_kind=rng.choice(["cumulative", "final_only"]), **given[kind])
