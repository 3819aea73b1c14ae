"""What quantization costs a checkpoint: perplexity, and how far its distributions are from the exact ones.

    python -m benchmarks.quality MODEL --text FILE

Each row keeps the weights or the cache in one way. The exact distributions are those of the same weights in float32: of
a GGUF file, of the numbers that its blocks stand for. The divergence is that of Kullback and Leibler, from the exact
distribution of the next token to the row's, over the whole vocabulary: the mean of all tokens, in nats. Each row is
printed as JSON. With --llama-cpp, formats that llama.cpp makes of the same GGUF file are run by llama.cpp and compared
with the same exact distributions.
"""

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.engines.peers import ROOT, LlamaCpp, num_threads
from quire import kernels
from quire.common.batch import ScheduledSequence
from quire.config.kv_layout import kv_cache_config
from quire.config.model import ModelConfig
from quire.kernels import Matrix
from quire.models.base import CausalLM
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import Projection
from quire.models.weights.loader import load_servable
from quire.runner.cache_engine import CacheEngine
from quire.runner.model_runner import build_tensors
from quire.text.tokenizer.tokenizer import Tokenizer

BLOCK_SIZE = 16
WAYS: dict[str, dict[str, str]] = {
    "as stored, float32": {"dtype": "float32"},
    "as stored, bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int8 KV cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
}


class Scorer:
    """A model whose weights and cache are kept in one way."""

    def __init__(self, model: str, piece: int, dtype: str, quantization: str | None = None, kv_cache_dtype: str = ""):
        config = ModelConfig.resolve(model, dtype=dtype, quantization=quantization)
        loaded = load_servable(config)
        assert isinstance(loaded, CausalLM)
        self.model = loaded
        specs = self.model.kv_cache_specs(config)
        if kv_cache_dtype:
            specs = [dataclasses.replace(spec, dtype=kv_cache_dtype) for spec in specs]  # type: ignore[type-var]
        self._piece, self._num_blocks = piece, -(-piece // BLOCK_SIZE)
        cache = kv_cache_config(specs, BLOCK_SIZE, num_blocks=self._num_blocks * len(specs))
        self._cache = CacheEngine(cache, kernels.backend_for("cpu"))

    @torch.inference_mode()
    def log_probabilities(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """[tokens, vocab] float32 for each piece of the text: of the next token, after each but the very last."""
        groups = range(len(self._cache.config.groups))
        tables = tuple(np.arange(g * self._num_blocks, (g + 1) * self._num_blocks, dtype=np.int32) for g in groups)
        for start in range(0, len(token_ids) - 1, self._piece):
            tokens = tuple(token_ids[start : min(start + self._piece, len(token_ids) - 1)])
            batch = build_tensors([ScheduledSequence(0, tokens, 0, tables)], BLOCK_SIZE)
            yield self.model.compute_logits(self.model(batch, self._cache.layers)).log_softmax(-1)


def expand(model: CausalLM) -> None:
    """Multiply by the numbers that quantized matrices stand for, and round no inputs."""
    for module in model.modules():
        if isinstance(module, Projection):
            module.weight = expanded(module.weight)
        elif isinstance(module, Embedding) and module.packed and not isinstance(module.table, Tensor):
            table = expanded(module.table)
            assert not isinstance(table, kernels.StackedWeight)
            module.table = table


def expanded(matrix: Matrix) -> Matrix:
    """The matrix in the dtype it computes in."""
    if isinstance(matrix, kernels.StackedWeight):
        return kernels.pack_weight(torch.cat([_rows(part) for part in matrix.parts]))
    return kernels.pack_weight(_rows(matrix))


def _rows(matrix: kernels.PackedWeight | kernels.QuantizedWeight) -> Tensor:
    return kernels.embedding(torch.arange(matrix.n), matrix)


def compare(exact: Scorer, other: Iterable[Tensor], token_ids: Sequence[int]) -> dict[str, float]:
    """Perplexity of the other's log-probabilities, its ratio to the exact one's, and the mean divergence."""
    logs = {"exact": 0.0, "other": 0.0}
    divergence, done = 0.0, 0
    for of_exact, of_other in zip(exact.log_probabilities(token_ids), other, strict=True):
        following = torch.tensor(token_ids[done + 1 : done + 1 + len(of_exact)])[:, None]
        logs["exact"] -= of_exact.gather(1, following).double().sum().item()
        logs["other"] -= of_other.gather(1, following).double().sum().item()
        divergence += (of_exact.exp() * (of_exact - of_other)).double().sum().item()
        done += len(of_exact)
    perplexity = math.exp(logs["other"] / done)
    return {
        "perplexity": round(perplexity, 3),
        "times exact": round(perplexity / math.exp(logs["exact"] / done), 4),
        "divergence": round(divergence / done, 5),
        "tokens": done,
    }


def llama_cpp_scores(
    engine: LlamaCpp, gguf: Path, weight_format: str, token_ids: Sequence[int], piece: int
) -> Iterator[Tensor]:
    """As Scorer.log_probabilities, from llama.cpp. Raises LeftOutError if it cannot be installed or fails."""
    with tempfile.TemporaryDirectory(dir=engine.folder) as folder:
        tokens, out = Path(folder) / "tokens.json", Path(folder) / "scores.npy"
        tokens.write_text(json.dumps(list(token_ids)), encoding="utf-8")
        engine.run_driver("llama_cpp_scores", gguf, weight_format, tokens, piece, num_threads(), out)
        scores = np.load(out, mmap_mode="r")
        for start in range(0, len(scores), piece):
            yield torch.from_numpy(np.array(scores[start : start + piece]))


def main() -> None:
    """Print a row for each way that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("model", help="checkpoint folder, GGUF file, or embedded checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="file of UTF-8 text")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of the text that are scored")
    parser.add_argument("--piece", type=int, default=1024, help="tokens that see each other")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--llama-cpp", nargs="+", default=[], metavar="FORMAT", help="such as as-stored Q8_0 Q4_K_M")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "benchmarks", help="of llama.cpp's environment")
    options = parser.parse_args()
    config = ModelConfig.resolve(options.model)
    tokenizer = Tokenizer.from_path(config.tokenizer_path)
    token_ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.max_tokens + 1]
    exact = Scorer(options.model, options.piece, "float32")
    expand(exact.model)
    for name in options.ways:
        other = Scorer(options.model, options.piece, **WAYS[name])
        row = compare(exact, other.log_probabilities(token_ids), token_ids)
        print(json.dumps({"weights": name} | row), flush=True)
    engine = LlamaCpp(options.folder)
    for name in options.llama_cpp:
        engine.install()
        row = compare(exact, llama_cpp_scores(engine, config.path, name, token_ids, options.piece), token_ids)
        print(json.dumps({"weights": f"llama.cpp {name}"} | row), flush=True)


if __name__ == "__main__":
    main()
