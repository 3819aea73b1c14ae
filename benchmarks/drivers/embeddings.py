"""Embedders: `embeddings KIND MODEL FOLDER [PRECISION]`. FOLDER has models that are converted for the engine."""

import json
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drivers.protocol import Handler, serve, timed

_NUM_SHORT = 40
_CALIBRATION = [f"Text number {i}: {'how to copy files and search in them ' * (i % 20)}" for i in range(100)]
_BATCH = 32
"""Texts that engines pad to one length, which is the default of sentence-transformers."""
_AT_ONCE = 64
"""Texts of an HTTP request."""
Embed = Callable[[Sequence[str]], object]


def load() -> Mapping[str, Handler]:
    """Load the model."""
    kind, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    embed = _KINDS[kind](model, folder)

    def short(text: str) -> dict[str, Any]:
        times = [timed(lambda: embed([text])) for _ in range(_NUM_SHORT)]
        return {"elapsed_s": statistics.median(times)}

    return {"embed": lambda texts: {"elapsed_s": timed(lambda: embed(texts))}, "short": short, "limits": _limits}


def _limits(precision: str) -> dict[str, Any]:
    from dataclasses import asdict

    from quire.cli.bench.limits import Limits

    return asdict(Limits.measure(precision))


def _quire(model: str, _: Path) -> Embed:
    from quire import LLM

    llm = LLM(model, **json.loads(sys.argv[4]))
    return lambda texts: llm.embed(texts, use_tqdm=False)


def served(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start `quire serve`, and wait until it is ready: the process, and its address."""
    command = [sys.executable, "-m", "quire", "serve", "--port=0", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    line = next((line for line in server.stdout if " at http://" in line), None)
    if line is None:
        raise RuntimeError(f"the server ended with {server.wait()}")
    threading.Thread(target=server.stdout.read, daemon=True).start()  # its log must not fill the pipe
    return server, line.split(" at ")[1].split()[0]


def _quire_http(model: str, _: Path) -> Embed:
    """A server, and clients that send texts by the number, two requests at a time."""
    from concurrent.futures import ThreadPoolExecutor

    options = [f"--{name.replace('_', '-')}={value}" for name, value in json.loads(sys.argv[4]).items()]
    url = served(model, *options)[1] + "/v1/embeddings"
    pool = ThreadPoolExecutor(2)

    def post(texts: Sequence[str]) -> bytes:
        body = json.dumps({"input": texts, "encoding_format": "base64"}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            found: bytes = response.read()
        return found

    return lambda texts: list(pool.map(post, [texts[i : i + _AT_ONCE] for i in range(0, len(texts), _AT_ONCE)]))


def _torch(model: str, _: Path) -> Embed:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(model, device="cpu").encode  # type: ignore[no-any-return]


def _openvino(model: str, folder: Path) -> Embed:
    """Weights and inputs of products are integers (NNCF). Texts are tokenized, sorted and pooled as others do it."""
    import numpy as np
    import openvino
    from tokenizers import Tokenizer

    where = folder / "minilm-onnx"
    _export_onnx(model, where)
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def inputs(texts: Sequence[str]) -> dict[str, Any]:
        encoded = tokenizer.encode_batch(list(texts))
        rows = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        return {name: np.array([getattr(each, field) for each in encoded]) for name, field in rows.items()}

    if not (where / "int8.xml").exists():
        import nncf

        plain = openvino.Core().read_model(where / "fp32.onnx")
        samples = nncf.Dataset([inputs([text]) for text in _CALIBRATION])
        quantized = nncf.quantize(plain, samples, model_type=nncf.ModelType.TRANSFORMER)
        openvino.save_model(quantized, where / "int8.xml")
    compiled = openvino.Core().compile_model(where / "int8.xml", "CPU", {"PERFORMANCE_HINT": "LATENCY"})

    def embed(texts: Sequence[str]) -> object:
        order, found = sorted(texts, key=len), []
        for start in range(0, len(order), _BATCH):
            given = inputs(order[start : start + _BATCH])
            mask = given["attention_mask"][..., None]
            rows = (compiled(given)[0] * mask).sum(1) / mask.sum(1)
            found.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        return found

    return embed


def _fastembed(model: str, folder: Path) -> Embed:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    where, name = folder / "minilm-onnx", f"{sys.argv[4]}.onnx"
    _export_onnx(model, where)
    source = ModelSource(hf="local/minilm")
    TextEmbedding.add_custom_model(
        "local/minilm", pooling=PoolingType.MEAN, normalization=True, sources=source, dim=384, model_file=name
    )
    embedder = TextEmbedding("local/minilm", specific_model_path=str(where))
    return lambda texts: list(embedder.embed(sorted(texts, key=len), batch_size=_BATCH))  # it pads, and does not sort


def _export_onnx(model: str, where: Path) -> None:
    """Write `fp32.onnx`, and `int8.onnx` whose activations are quantized while it runs."""
    if (where / "int8.onnx").exists():
        return
    import shutil

    import torch
    from onnxruntime.quantization import quantize_dynamic
    from transformers import AutoModel

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(model, attn_implementation="eager")

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    shutil.copytree(model, where, dirs_exist_ok=True)
    ids = torch.ones(2, 8, dtype=torch.int64)
    names = ("input_ids", "attention_mask", "token_type_ids")
    axes = {name: {0: "batch", 1: "tokens"} for name in (*names, "last_hidden_state")}
    torch.onnx.export(
        Plain().eval(), (ids, ids, ids * 0), str(where / "fp32.onnx"), input_names=list(names),
        output_names=["last_hidden_state"], dynamic_axes=axes, dynamo=False, opset_version=17,
    )  # fmt: skip
    quantize_dynamic(where / "fp32.onnx", where / "int8.onnx", per_channel=True)


_KINDS: Mapping[str, Callable[[str, Path], Embed]] = {
    "quire": _quire,
    "quire-http": _quire_http,
    "sentence-transformers": _torch,
    "openvino": _openvino,
    "fastembed": _fastembed,
}

if __name__ == "__main__":
    serve(load)
