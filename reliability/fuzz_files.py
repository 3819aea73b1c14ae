"""The parsers of files and of the environment, as targets of reliability.fuzz."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import tokenizers

from quire import kernels
from quire.cli import generate
from quire.common import faults as fault_table
from quire.common.errors import CheckpointError, ConfigError, InvalidPromptError, TokenizerError
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.safetensors import INDEX_FILE, read_header
from quire.config.model import ModelConfig, rope_config
from quire.interfaces.simulate.trace import read_trace
from quire.kernels.backends.native.backend import NativeBackend
from quire.models.registry import model_class
from quire.models.weights.loader import reading
from quire.server.api.responses.protocol import Reasoning, Response, TextConfig
from quire.server.api.responses.run import _failed_json
from quire.server.api.responses.store import ResponseStore, StoredResponse, StoreError
from quire.server.config import ServerArgs, describe_args, merge_args
from quire.server.http.auth import ApiKeys
from quire.text.tokenizer.files import read_tokenizer_files
from reliability.fuzz_target import JSON, Target, folder, refusal, scratch

# --- safetensors headers


def safetensors(data: bytes) -> str:
    """Check that every tensor of an accepted header lies within the file and has the length of its shape."""
    try:
        tensors = read_header(scratch(data))
    except CheckpointError as error:
        return refusal(error, len(str(error)) < 4000, "a short message")
    end = 8 + int.from_bytes(data[:8], "little")
    for tensor in tensors.values():
        assert tensor.offset == end
        assert tensor.num_bytes % max(1, math.prod(tensor.shape)) == 0
        end += tensor.num_bytes
    assert end == len(data)
    return ""


def _safetensors_corpus() -> list[bytes]:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    headers: list[dict[str, Any]] = [
        {}, {"a": entry}, {"a": entry, "b": entry | {"data_offsets": [8, 16]}, "__metadata__": {"format": "pt"}},
        {"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}},
        {"a": entry | {"shape": [0], "data_offsets": [0, 0]}},
    ]  # fmt: skip
    made = []
    for header in headers:
        text = json.dumps(header).encode()
        num_bytes = max([0, *(entry["data_offsets"][1] for entry in header.values() if "dtype" in entry)])
        made.append(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return made


# --- checkpoints


def config(data: bytes) -> str:
    """Check that a config.json gives a model (without weights) or a CheckpointError."""
    place = folder("config")
    (place / "config.json").write_bytes(data)
    try:
        found = dataclasses.replace(ModelConfig.resolve(place), max_model_len=1)
        rope_config(found.hf_config)
        kind = model_class(found.architecture, found.model_impl)
        assert len(kind.kv_cache_specs(found)) == found.hf_config.size("num_hidden_layers")
    except CheckpointError as error:
        return refusal(error)
    return ""


def _config_corpus() -> list[bytes]:
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9, "dtype": "float32"}
    more = {"intermediate_size": 16, "max_position_embeddings": 64, "num_key_value_heads": 1, "rms_norm_eps": 1e-6}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32}
    longrope = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2, 2]}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}
    compressed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    kinds: list[dict[str, Any]] = [
        {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": yarn, "rope_theta": 500000, "eos_token_id": [2, 3]},
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": longrope, "original_max_position_embeddings": 16},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4, "head_dim": 4, "eos_token_id": 2},
        {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "attention_bias": False},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4},
        {"architectures": ["OPTForCausalLM"], "ffn_dim": 16, "word_embed_proj_dim": 8, "activation_function": "relu"},
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_head": 2, "n_positions": 16, "n_inner": None},
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"sliding_window": 4, **shape}},
        {"architectures": ["Olmo3ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
        {"architectures": ["MptForCausalLM"], "d_model": 8, "attn_config": {"alibi": True, "alibi_bias_max": 8}},
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"architectures": ["LlamaForCausalLM"], "quantization_config": compressed},
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
    ]  # fmt: skip
    return [json.dumps(shape | more | kind).encode() for kind in kinds]


def index(data: bytes) -> str:
    """Check that an index opens only files of its own folder and that each tensor is in its file."""
    place = folder("index")
    (place / "a.safetensors").write_bytes(_safetensors_corpus()[2])
    (place / INDEX_FILE).write_bytes(data)
    try:
        checkpoint = open_checkpoint(place)
    except CheckpointError as error:
        return refusal(error)
    for name in checkpoint.tensors:
        with reading(checkpoint, name) as tensor:
            assert tensor.numel() == 2
    return ""


def _index_corpus() -> list[bytes]:
    maps = [{"a": "a.safetensors", "b": "a.safetensors"}, {"a": "a.safetensors"}, {"a": "b.safetensors"}, {}]
    return [json.dumps({"metadata": {"total_size": 16}, "weight_map": given}).encode() for given in maps]


_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def tokenizer(data: bytes) -> str:
    """Check the files beside a tokenizer: special tokens have a text, added tokens the id that the files give."""
    if not data:
        return "too short"
    place = _tokenizer_folder()
    for name in _TOKENIZER_FILES:
        (place / name).unlink(missing_ok=True)
    (place / _TOKENIZER_FILES[data[0] % len(_TOKENIZER_FILES)]).write_bytes(data[1:])
    try:
        found = read_tokenizer_files(place)
    except TokenizerError as error:
        return refusal(error)
    assert all(found.special_tokens.values())
    assert found.backend.encode("a b").ids
    assert all(isinstance(text, str) for text in found.chat_templates.values())
    return ""


@cache
def _tokenizer_folder() -> Path:
    place = folder("tokenizer")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<s>": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(place / "tokenizer.json"))
    return place


def _tokenizer_corpus() -> list[bytes]:
    added = {"content": "<t>", "lstrip": True, "special": True}
    config = {"bos_token": "<s>", "eos_token": added, "added_tokens_decoder": {"4": added, "2": {"content": "<s>"}}}
    templates = [{"name": "default", "template": "{{ a }}"}, {"name": "tools", "template": "{{ b }}"}]
    given: list[tuple[int, dict[str, Any]]] = [
        (0, config | {"chat_template": "{{ messages }}", "additional_special_tokens": ["<s>", added]}),
        (0, {"chat_template": templates, "add_bos_token": True, "extra_special_tokens": {"image": "<i>"}}),
        (1, {"bos_token": {"content": "<s>"}, "pad_token": None}), (2, {"<t>": 4, "<u>": 5}),
    ]  # fmt: skip
    return [*(bytes([kind]) + json.dumps(fields).encode() for kind, fields in given), b"\x03{{ messages }}"]


# --- files that an operator writes


def options(data: bytes) -> str:
    """Check that a configuration file gives arguments or a ConfigError, and that keys are never shown."""
    if not data:
        return "too short"
    path = scratch(data[1:], "quire.toml" if data[0] % 2 else "quire.yaml")
    try:
        server, models = merge_args(str(path), {})
    except ConfigError as error:
        return refusal(error)
    shown = describe_args(server, *models)
    assert not any(len(key) > 8 and key in shown for key in server.api_key)
    return ""


def _options_corpus() -> list[bytes]:
    yaml = [
        b"models: {a: quire-tiny, b: {model: quire-tiny, seed: 1}}\nport: 1",
        b"port: 8000\nmax-num-seqs: 4\napi_key: [secret-of-one, b]\n# no\nhost: '::1'", b"swap_space: 1.5\nuds: ~\n",
        b"a: &x [1, 2]\nb: *x\n", b"model: !!str 5\nseed: 0x1F\nworkers: 2001-01-01",
    ]  # fmt: skip
    toml = [b"port = 8000\nmax-num-seqs = 4\napi_key = ['secret-of-one']", b"model = 'a'\n[a.b]\nc = 2001-01-01"]
    return [*(b"\0" + each for each in yaml), *(b"\1" + each for each in toml)]


def keys(data: bytes) -> str:
    """Check that each key of a key file is found under its own name, and that no message contains a key."""
    path = scratch(data)
    try:
        found = ApiKeys.load(ServerArgs(api_key_file=str(path)), {})
    except ConfigError as error:
        given = [line.partition(":")[2].strip() for line in data.decode("utf-8", "ignore").splitlines()]
        return refusal(error, not any(len(key) > 20 and key in str(error) for key in given), "secrets")
    listed = [line.strip().split(":", 1) for line in data.decode().splitlines() if line.strip()]
    for name, key in [pair for pair in listed if not pair[0].startswith("#")]:
        assert found.name_of(key.strip().encode()) == name
    return "" if found else "no key"


def _keys_corpus() -> list[bytes]:
    long = b"team.one:0123456789abcdef0123456789abcdef\r\nb:\xc3\xa9"
    return [b"a:key-of-a\nb: key:of:b \n\n# no\n", long, b"a:k\na:l"]


def faults(data: bytes) -> str:
    """Check that QUIRE_FAULTS arms faults or gives a ConfigError."""
    given = data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    with mock.patch.object(fault_table, "_arm") as arm, mock.patch.object(fault_table, "logger"):
        try:
            fault_table._arm_from_environment(given)
        except ConfigError as error:
            return refusal(error)
    for injected in arm.call_args.args if arm.called else ():
        assert isinstance(injected.fault.exception(), Exception)
    return "" if arm.called else "nothing"


def _faults_corpus() -> list[bytes]:
    fault = fault_table.Fault
    points = [name for name in fault_table.POINTS if name != "memory.native"][:2]
    lists = [
        [fault(points[0])], [fault(points[1], "delay", seconds=0.5, after=3, times=None, subject="a")],
        [fault(points[0], error="ENOSPC", subject=5), fault("memory.native", after=9)],
    ]  # fmt: skip
    return [msgspec.json.encode(each) for each in lists]


def prompts(data: bytes) -> str:
    """Check that each line of a prompts file, text or JSON, is a text or an object with a prompt."""
    if not data:
        return "too short"
    path = scratch(data[1:], "prompts.jsonl" if data[0] % 2 else "prompts.txt")
    try:
        found = list(generate._read_file(str(path)))
    except InvalidPromptError as error:
        return refusal(error)
    assert all(isinstance(item, str | dict) for item in found)
    return "" if found else "no prompt"


def _prompts_corpus() -> list[bytes]:
    items: list[Any] = ["a", {"prompt": "b", "id": 1}, {"prompt_token_ids": [1, 2]}, {"messages": [{"role": "user"}]}]
    return [b"\1" + b"\n".join(json.dumps(item).encode() for item in items), b"\0a\nb\r\n\n\xc3\xa9"]


# --- files of the operating system


def quota(data: bytes) -> str:
    """The groups' files, however they are written: some CPUs, or no limit."""
    backend = kernels.backend_for("cpu")
    if len(data) < 2 or not isinstance(backend, NativeBackend):
        return "too short"
    place = folder("quota")
    (place / "cpu").mkdir(exist_ok=True)
    groups = (b"0::/\n", b"4:cpu,cpuacct:/\n")
    for name in ("groups", "cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
        (place / name).write_bytes(b"100000")
    changed = ("groups", "cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")[data[0] % 4]
    (place / "groups").write_bytes(groups[data[0] % 4 >= 2])
    (place / changed).write_bytes(data[1:])
    found = backend.native.cpu_quota(str(place / "groups"), str(place))
    assert found >= 0
    return "" if found > 0 else "no limit"


def _quota_corpus() -> list[bytes]:
    return [
        b"\x000::/\n4:cpu,cpuacct:/\n1:name=systemd:/a/b\n", b"\1150000 100000", b"\1max 100000\n", b"\x02250000\n",
        b"\x03100000\n",
    ]  # fmt: skip


# --- files that a server has saved


async def _read_store(path: Path) -> list[StoredResponse]:
    store = ResponseStore(path, max_responses=9, max_bytes=10**6, fail=_failed_json)
    try:
        found = await store.get("o", "resp_1")
        with contextlib.suppress(KeyError):  # the chain is incomplete, as after a deletion
            await store.chain("o", "resp_2", 10**6)
        await store.add("o", StoredResponse("resp_new", "resp_2", False, b"{}", b"[]"))
        return [] if found is None else [found]
    finally:
        store.close()


def store(data: bytes) -> str:
    """Check that a corrupted database of responses is opened or rejected, and never read in part."""
    place = folder("store")
    for path in place.iterdir():
        path.unlink()
    shutil.copy(_good_store(), place / "kept")
    with (place / "kept").open("r+b") as file:
        for at in range(0, len(data) - 3, 4):  # each four bytes are an offset and a new byte
            file.seek(int.from_bytes(data[at : at + 3], "little") % _good_store().stat().st_size)
            file.write(data[at + 3 : at + 4])
    try:
        found = asyncio.run(_read_store(place / "kept"))
    except (ConfigError, StoreError) as error:
        return refusal(error)
    assert all(isinstance(each.response, bytes) and isinstance(each.input_items, bytes) for each in found)
    return "" if found else "not there"


@cache
def _good_store() -> Path:
    path = folder("good") / "store"

    async def fill() -> None:
        store = ResponseStore(path, max_responses=9, max_bytes=10**6, fail=_failed_json)
        await store.add("o", StoredResponse("resp_1", None, False, b'{"output": []}', b"[]"))
        await store.add("o", StoredResponse("resp_2", "resp_1", True, _running(), b'[{"type": "message"}]'))
        store.close()

    asyncio.run(fill())
    return path


def _running() -> bytes:
    return msgspec.json.encode(Response(id="resp_2", created_at=1, model="m", text=TextConfig(), reasoning=Reasoning()))


def _store_corpus() -> list[bytes]:
    size = _good_store().stat().st_size
    last_page = size - 4096
    places = [0, 18, 24, 60, 68, 100, 4096, last_page + 8, size - 200, size - 20]
    return [b"", *(place.to_bytes(3, "little") + b"\1" for place in places)]


# --- inputs of simulations


def trace(data: bytes) -> str:
    """Check that a trace gives requests in order of arrival, or an error that names the line."""
    try:
        requests = list(read_trace(scratch(data)))
    except ConfigError as error:
        return refusal(error, "line" in str(error), "the number of the line")
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(requests))
    return "" if requests else "no line"


def _trace_corpus() -> list[bytes]:
    lines: list[dict[str, Any]] = [
        {"arrival_s": 0, "prompt_len": 5, "output_len": 3},
        {"arrival_s": 1.5, "prompt_len": 9, "output_len": 1, "n": 4, "tenant": "a"},
        {"arrival_s": 2, "prompt_len": 9, "output_len": 1, "session": 1, "prefix_group": 3, "prefix_len": 4},
        {"arrival_s": 3, "prompt_len": 9, "output_len": 1, "session": 1, "think_s": 1, "priority": -3, "beam_width": 2},
    ]  # fmt: skip
    made = [json.dumps(line).encode() + b"\n" for line in lines]
    return [*made, b"".join(made)]


_CONFIG = b"rope_type linear factor llama3 dynamic bfloat16 quire rms_norm_eps 1" + b"0" * 400
_YAML = b'!!int !!float !!timestamp !!bool !!binary ? - & * << --- ~ \n \t 0x 0o 1_0 2001-99-99 = [[ """ port host'

_PLACES = tuple(place.to_bytes(3, "little") + bytes([place % 13]) for place in range(0, 20_000, 61))

TARGETS = {
    "safetensors": Target(safetensors, _safetensors_corpus, (*JSON, *b"dtype shape data_offsets F32".split())),
    "index": Target(index, _index_corpus, (*JSON, *b"weight_map a.safetensors ../ b.safetensors".split(), b"x" * 300)),
    "config": Target(config, _config_corpus, (*JSON, *_CONFIG.split())),
    "tokenizer": Target(tokenizer, _tokenizer_corpus, (*JSON, *b"content special <s> added_tokens_decoder".split())),
    "trace": Target(trace, _trace_corpus, (*JSON, b"\n", *b"session prefix_len arrival_s".split())),
    "prompts": Target(prompts, _prompts_corpus, (*JSON, b"\n", *b"prompt messages prompt_token_ids".split())),
    "options": Target(options, _options_corpus, (*JSON, *_YAML.split())),
    "keys": Target(keys, _keys_corpus, (b":", b"\n", b"\r", b"\xc2\x85", b"#", b" ", b"\xff", b"\0")),
    "faults": Target(faults, _faults_corpus, (*JSON, *b"point error UnicodeDecodeError ENOENT".split())),
    "quota": Target(quota, _quota_corpus, (b":", b"/", b"\n", b" ", b"max", b"nan", b"inf", b"-", b"1e400", b"cpu")),
    "store": Target(store, _store_corpus, _PLACES),
}
"""Targets by name."""
