"""Checkpoints from strangers: nothing in them is run, nothing outside of them is read, and each error is one line."""

import json
import math
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.common.errors import CheckpointError, OutOfMemoryError
from quire.config.checkpoint.safetensors import DTYPES, read_header
from tests.config import gguf_file
from tests.config.gguf_file import TABLE, Stored, Typed, gguf_bytes, header_of, model_bytes
from tests.hostile.packed import PACKED
from tests.hostile.target import PATIENCE, RESULTS
from tests.hostile.test_templates import TINY

WEIGHTS = "model.safetensors"


class Payload:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def header(folder: Path, entries: Any, data: bytes = b"", length: int | None = None) -> None:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    (folder / WEIGHTS).unlink()
    size = len(text) if length is None else length
    (folder / WEIGHTS).write_bytes(size.to_bytes(8, "little") + text + data)


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def index(folder: Path, file: Any) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    names = {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    text = json.loads(path.read_text()) | values
    path.unlink()
    path.write_text(json.dumps(text))


def rewrite(folder: Path, name: str, text: bytes) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(text)


def huge_header(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with (folder / WEIGHTS).open("wb") as file:
        file.write((90_000_000).to_bytes(8, "little"))
        file.truncate(90_000_008)


def many_tensors(folder: Path) -> None:
    header(folder, {f"t{i}": entry([1], 4 * i, 4 * i + 4) for i in range(20_000)}, bytes(80_000))


def with_code(folder: Path) -> None:
    """As transformers would run it, if it were told to trust it."""
    config(folder, auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}, architectures=["M"])
    for name in ("code.py", "__init__.py", "sitecustomize.py", "modeling_llama.py", "conftest.py"):
        (folder / name).write_text(f"import os; os.mkdir({str(folder / 'RAN')!r})")


def in_pickle(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Payload(folder / "RAN")))

    return make


def gguf(content: bytes) -> Callable[[Path], None]:
    """The folder then holds this GGUF file alone."""

    def make(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        (folder / "m.gguf").write_bytes(content)

    return make


def huge_gguf(folder: Path) -> None:
    gguf(gguf_bytes({"a": Typed(gguf_file.STRING, "x")}))(folder)
    with (folder / "m.gguf").open("r+b") as file:
        file.seek(24 + 8 + 1 + 4)  # the length of the string
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**20)


def other(architecture: str, *tensors: Stored, **keys: Any) -> Callable[[Path], None]:
    """The folder then holds a GGUF file of this architecture alone, with a token table and these tensors."""
    tokenizer = {"model": "gpt2", "tokens": [*"abcdefgh"], "merges": []}
    header = header_of(architecture, **keys) | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    return gguf(gguf_bytes(header, [TABLE, *tensors]))


def gptq(**values: Any) -> Callable[[Path], None]:
    section = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True} | values
    return lambda folder: config(folder, quantization_config=section)


def compressed(**values: Any) -> Callable[[Path], None]:
    """`weights` are merged into those of the only group."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | values.pop("weights", {})
    groups = {"group_0": {"targets": values.pop("targets", ["Linear"]), "weights": weights}}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | values
    return lambda folder: config(folder, quantization_config=section)


def in_float8(number: int) -> Callable[[Path], None]:
    """All projections in FP8, each number with this byte."""

    def make(folder: Path) -> None:
        entries, data = {}, b""
        for name, tensor in read_header(folder / WEIGHTS).items():
            is_matrix = "_proj" in name
            size = math.prod(tensor.shape) if is_matrix else tensor.num_bytes
            spelled = next(key for key, (dtype, _) in DTYPES.items() if dtype == tensor.dtype)
            entries[name] = entry([*tensor.shape], len(data), len(data) + size, "F8_E4M3" if is_matrix else spelled)
            data += bytes([number]) * size
            if is_matrix:
                scale = name.replace("weight", "weight_scale")
                entries[scale] = entry([1], len(data), len(data) + 4)
                data += bytes(4)
        header(folder, entries, data)
        config(folder, quantization_config={"quant_method": "fp8"})

    return make


def only_tokenizer(name: str, data: bytes) -> Callable[[Path], None]:
    """The folder then has this file in the place of tokenizer.json."""

    def make(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / name).write_bytes(data)

    return make


GIB = b"\x80\x80\x80\x80\x04"
"""The number 2**30 in a file of protocol buffers."""
NESTED = Typed(gguf_file.ARRAY, [Typed(gguf_file.ARRAY, [Typed(gguf_file.ARRAY, ["a"])])])
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "GGUF: a string of a gigabyte": (huge_gguf, "at most 16777216 are allowed"),
    "GGUF: a trillion tensors": (gguf(model_bytes(num_tensors=10**12)), "tensors"),
    "GGUF: a trillion keys": (gguf(model_bytes(num_keys=10**12)), "keys|values|metadata"),
    "GGUF: cut off": (gguf(model_bytes()[:-100]), "truncated"),
    "GGUF: nothing but its name": (gguf(b"GGUF"), "truncated|bytes"),
    "GGUF: alignment 0": (gguf(model_bytes({"general.alignment": 0})), "alignment"),
    "GGUF: nested arrays": (gguf(model_bytes({"a": NESTED})), "array"),
    "GGUF: a type that is none": (gguf(model_bytes({}, Stored("x", (4,), 999))), "999"),
    "GGUF: overlapping tensors": (gguf(model_bytes({}, Stored("x", (4,), 0, bytes(16), 0))), "overlaps|offset|after"),
    "GGUF: a shape beyond every number": (gguf(model_bytes({}, Stored("x", (2**62, 2**62)))), "shape|dimensions|large"),
    "GGUF: another architecture": (gguf(model_bytes({"general.architecture": "bert"})), "bert"),
    "GGUF: a version of the future": (gguf(gguf_bytes(version=2**31)), "version 2147483648"),
    "GGUF: a key twice": (gguf(gguf_bytes([("a", 1), ("a", 1)])), "twice"),
    "GGUF: an array of a trillion numbers": (
        gguf(gguf_bytes({"a": 1})[:-8] + struct.pack("<IIQ", gguf_file.ARRAY, 4, 10**12)), "1000000000000 items"
    ),
    "GGUF: an offset beyond every number": (gguf(model_bytes({}, Stored("x", (4,), 0, b"", 2**63))), "beyond the end"),
    "GGUF: blocks that are cut": (gguf(model_bytes({}, Stored("x", (33, 1), 8, bytes(68)))), "multiples of 32"),
    "GGUF: rope factors of the wrong length": (
        gguf(model_bytes({}, Stored("rope_freqs.weight", (3,), 0, bytes(12)))), r"must be float32 \[4\]"
    ),
    "GGUF: rope factors of zero": (
        gguf(model_bytes({}, Stored("rope_freqs.weight", (4,), 0, bytes(16)))), "_factor' is 0.0"
    ),
    "GGUF: an embedding without a width": (
        gguf(gguf_bytes(header_of("llama"), [Stored("token_embd.weight")])), "two dimensions"
    ),
    "GGUF: four billion layers": (gguf(model_bytes({"llama.block_count": 2**31 - 1})), "more than 4096"),
    "GGUF: no heads": (gguf(model_bytes({"llama.attention.head_count": 0})), "head_count' is 0"),
    "GGUF: a billion heads": (gguf(model_bytes({"llama.attention.head_count": 10**9})), "more than the width 16"),
    "GGUF: more layers ahead than there are": (
        other("glm4moe", nextn_predict_layers=5, expert_count=2, expert_used_count=1), "num_hidden_layers' is -3"
    ),
    "GGUF: a billion experts": (
        other("gpt-oss", expert_count=10**9, expert_used_count=1), "experts|Routing|num_experts"
    ),
    "GGUF: queries of other heads": (
        other("gptneox", Stored("blk.0.attn_qkv.weight", (16, 7), 0, bytes(448))),
        "the 7 rows of 'blk.0.attn_qkv.weight'",
    ),
    "GGUF: experts of another shape": (
        other("olmoe", Stored("blk.0.ffn_up_exps.weight", (16, 4), 0, bytes(256)), expert_count=2,
              expert_used_count=1), "missing"
    ),
    "GGUF: a norm in blocks": (
        other("gemma", Stored("output_norm.weight", (32,), 8, bytes(34))), "'output_norm.weight' is uint8"
    ),
    "GGUF: windows of too few layers": (
        other("cohere2", attention__sliding_window=8, attention__sliding_window_pattern=[True, False, True]),
        "3 values for 2 layers",
    ),
    "GGUF: activations without numbers": (
        gguf(gguf_bytes(header_of("apertus") | {"xielu.alpha_n": ["a", "b"]}, [TABLE])),
        "'xielu.alpha_n' must be an array",
    ),
    "GPTQ: a pattern that takes for ever": (gptq(dynamic={r"(.+)+\1!": {}}), "back references"),
    "GPTQ: no such bits": (gptq(bits=2**40), "bits"),
    "compressed-tensors: a pattern that takes for ever": (compressed(ignore=["re:(.+)+(?<!x)"]), "look-behind"),
    "compressed-tensors: a giant pattern": (compressed(targets=["re:" + "a" * 10**6]), "2,000 characters"),
    "compressed-tensors: 100,000 patterns": (compressed(ignore=["re:.*a.*b"] * 10**5), "4,096 patterns"),
    "compressed-tensors: 100,000 groups": (compressed(config_groups={str(i): {} for i in range(10**5)}), "256 groups"),
    "compressed-tensors: a strategy that is none": (compressed(weights={"strategy": "x" * 10**6}), "for each xxx"),
    "compressed-tensors: groups of 2 ** 40": (compressed(weights={"group_size": 2**40}), "group_size"),
    "compressed-tensors: groups of half an input": (compressed(weights={"group_size": 0.5}), "group_size"),
    "compressed-tensors: a quantized cache": (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    **PACKED,
    "FP8: a NaN in every place": (in_float8(0x7F), "not finite"),
    "FP8: blocks beyond every number": (
        lambda f: config(f, quantization_config={"quant_method": "fp8", "weight_block_size": [2**70, 1]}),
        "two positive",
    ),
    "a header beyond the file": (lambda f: header(f, {"a": entry([2], 0, 8)}, bytes(8), 2**63), "truncated"),
    "a header of all memory": (lambda f: header(f, b"", b"", 2**64 - 1), "truncated"),
    "an enormous header": (huge_header, "not valid JSON"),
    "20,000 tensors": (many_tensors, "unexpected|lacks|missing"),
    "overlapping tensors": (
        lambda f: header(f, {"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24)), "overlaps"
    ),
    "negative offsets": (lambda f: header(f, {"a": entry([2], -8, 0)}, bytes(8)), "malformed"),
    "offsets backwards": (lambda f: header(f, {"a": entry([2], 8, 0)}, bytes(8)), "malformed"),
    "offsets beyond the file": (lambda f: header(f, {"a": entry([2**40], 0, 2**42)}, bytes(8)), "truncated"),
    "offsets beyond every number": (lambda f: header(f, {"a": entry([2], 2**70, 2**70 + 8)}), "malformed"),
    "a shape beyond every number": (lambda f: header(f, {"a": entry([2**61] * 50_000, 0, 8)}, bytes(8)), "malformed"),
    "a tensor twice": (lambda f: header(f, b'{"a": {"dtype": "F32"}, "a": {"dtype": "F32"}}'), "twice"),
    "a header nested deeply": (lambda f: header(f, b"[" * 1_000_000), "not valid JSON"),
    "a header that is no UTF-8": (lambda f: header(f, b'{"\xff\xfe": 1}'), "not valid JSON"),
    "an unknown dtype": (lambda f: header(f, {"a": entry([2], 0, 8, "OBJECT")}, bytes(8)), "dtype"),
    "an index that climbs": (lambda f: index(f, "../../../../etc/passwd"), "of the same folder"),
    "an index to a safetensors file elsewhere": (lambda f: index(f, "../model.safetensors"), "of the same folder"),
    "an absolute path in the index": (lambda f: index(f, "/etc/passwd.safetensors"), "of the same folder"),
    "an index with a NUL": (lambda f: index(f, "a\0.safetensors"), "lacks the weight file"),
    "an index of no names": (lambda f: index(f, {"a": 1}), "of the same folder"),
    "weights in a pickle": (in_pickle("pytorch_model.bin"), "can run code"),
    "a pickle with another ending": (in_pickle("model.pt"), "can run code"),
    "a pickle that is called safetensors": (in_pickle(WEIGHTS), "truncated|not a safetensors|not valid JSON"),
    "code of its own": (with_code, "'M'"),
    "a config nested deeply": (lambda f: rewrite(f, "config.json", b'{"a":' * 200_000), "not valid JSON"),
    "a config of 20 MB": (lambda f: rewrite(f, "config.json", b" " * 20_000_000 + b"{}"), "at most"),
    "a config that is a device": (lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("/dev/zero")),
                                  "is not a regular file"),
    "a config of huge sizes": (lambda f: config(f, hidden_size=2**30), "do not fit into this machine"),
    "a config of a billion layers": (lambda f: config(f, num_hidden_layers=2**30), "more than 4096"),
    "a config of a billion heads": (
        lambda f: config(f, num_attention_heads=2**30, hidden_size=2**30), "more than 65536"
    ),
    "negative layers": (lambda f: config(f, num_hidden_layers=-1), "num_hidden_layers"),
    "a nested config without its text": (
        lambda f: rewrite(f, "config.json", b'{"architectures": ["Gemma3ForConditionalGeneration"]}'),
        "no 'text_config'",
    ),
    "a trillion experts": (
        lambda f: config(f, architectures=["MixtralForCausalLM"], num_local_experts=10**12), "num_local_experts"
    ),
    "more experts a token than there are": (
        lambda f: config(f, architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=9),
        "9 experts for each token, which chooses from 4",
    ),
    "an architecture of nowhere": (
        lambda f: config(f, architectures=["NowhereForCausalLM"], model_type="nowhere"), "`quire models` lists"
    ),
    "recommended parameters out of range": (
        lambda f: rewrite(f, "generation_config.json", b'{"temperature": "hot"}'), "temperature='hot'"
    ),
    "no numbers in the config": (lambda f: config(f, hidden_size=float("inf")), "hidden_size"),
    "a tokenizer that is none": (lambda f: rewrite(f, "tokenizer.json", b'{"model": null}'), "tokenizer.json"),
    "a tokenizer that is cut off": (
        lambda f: rewrite(f, "tokenizer.json", (TINY / "tokenizer.json").read_bytes()[:5000]), "tokenizer.json"
    ),
    "SentencePiece: nothing": (only_tokenizer("tokenizer.model", b""), "tokenizer.model.*0 unknown tokens"),
    "SentencePiece: cut off": (
        only_tokenizer("tokenizer.model", b"\n\x07\n\x05ab"), "tokenizer.model: field 1 has 7 bytes"
    ),
    "SentencePiece: a token of a gigabyte": (
        only_tokenizer("tokenizer.model", b"\n\x07\n" + GIB + b"a"), "field 1 has 1073741824 bytes"
    ),
    "tekken.json: cut off": (only_tokenizer("tekken.json", b'{"config": {"pattern": "'), "tekken.json"),
    "tekken.json: a billion special tokens": (
        only_tokenizer("tekken.json", json.dumps({"config": {
            "pattern": ".", "default_vocab_size": 2**30 + 300, "default_num_special_tokens": 2**30,
        }, "vocab": []}).encode()), "at most 65536 special ones"
    ),
    "tiktoken: a line without a rank": (only_tokenizer("qwen.tiktoken", b"YQ== 0\nYg==\n"), "line 2 is b'Yg=='"),
    "tiktoken: cut off": (only_tokenizer("qwen.tiktoken", b"YQ== 0\nYg== 1\nYw"), "line 3 is b'Yw'"),
    "tiktoken: bytes missing": (only_tokenizer("qwen.tiktoken", b"YQ== 0\n"), "no token for the byte 0"),
    "a tokenizer nested deeply": (lambda f: rewrite(f, "tokenizer.json", b"[" * 1_000_000), "tokenizer.json"),
    "a tokenizer of no Unicode": (
        lambda f: rewrite(f, "tokenizer_config.json", b'{"eos_token": "\\ud800"}'), "tokenizer"
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded checkpoint, to be spoilt."""
    made = tmp_path / "checkpoint"
    made.mkdir()
    for file in TINY.iterdir():
        (made / file.name).symlink_to(file)
    return made


@pytest.mark.parametrize("name", HOSTILE)
def test_offline(folder: Path, name: str):
    spoil, words = HOSTILE[name]
    spoil(folder)
    start_s = time.monotonic()
    with pytest.raises((CheckpointError, OutOfMemoryError), match=words) as caught:
        LLM(str(folder), num_gpu_blocks_override=8, max_model_len=64)
    assert time.monotonic() - start_s < 3 * PATIENCE
    assert len(str(caught.value)) < 4000
    assert not (folder / "RAN").exists(), "code of the checkpoint was run"
    RESULTS.counts["checkpoints offline"] += 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "code of its own" else [pytest.mark.thorough]) for name in HOSTILE]
)
def test_a_server_does_not_start(folder: Path, name: str):
    """It says why in a few lines, and ends with a status."""
    HOSTILE[name][0](folder)
    serve = ["-P", "-m", "quire", "serve"]  # -P: else Python itself would import what lies in the working folder
    command = [sys.executable, *serve, "--model", str(folder), "--port", "0", "--max-model-len", "64"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60 * PATIENCE, cwd=folder)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert len(ended.stderr) < 8000
    assert not (folder / "RAN").exists(), "code of the checkpoint was run"
    RESULTS.counts["checkpoints served"] += 1
