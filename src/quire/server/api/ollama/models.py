"""/api/tags, /api/show, /api/ps, /api/pull and /api/version: the models, in Ollama's form."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.common.errors import QuireError
from quire.common.progress import Download, current_download
from quire.common.version import __version__
from quire.config.checkpoint.architectures import POOLING_MODELS
from quire.config.checkpoint.formats import open_checkpoint, weight_files
from quire.config.checkpoint.gguf.files import is_gguf
from quire.config.checkpoint.location import is_downloadable
from quire.config.checkpoint.sentence_transformers import read_cross_encoder
from quire.config.model import ModelConfig
from quire.server.api.ollama import protocol as api
from quire.server.api.ollama.stream import rfc3339
from quire.server.api.tokens.protocol import Version
from quire.server.api.tools.formats import choose_reasoning_format, choose_tool_format
from quire.server.config import ServerArgs
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import ApiError, invalid
from quire.server.http.state import ServerState, state_of
from quire.server.models.entry import ModelEntry
from quire.server.models.spec import ModelSpec
from quire.text.tokenizer.tokenizer import Tokenizer

_NEVER = "9999-12-31T23:59:59Z"
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
_OF_ONE_MODEL: Mapping[str, Any] = {
    "tokenizer": None, "revision": None, "hf_overrides": None, "gguf_file": None, "lora_modules": (),
}  # fmt: skip
"""Engine arguments about one checkpoint, which a model that is pulled does not get from the first one."""
_STATUS_S = 1.0
"""Time between two lines of a download."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the files of a checkpoint say; all empty if they cannot be read, or may not have been downloaded yet."""

    config: ModelConfig | None = None
    num_params: int = 0
    num_bytes: int = 0
    modified_s: float = 0.0
    digest: str = ""
    block_type: str | None = None
    """The type of most blocks of a GGUF file; None if it has none."""

    @classmethod
    def read(cls, entry: ModelEntry) -> _Facts:
        """Read config and headers, but never download them. A checkpoint that cannot be read has no facts."""
        try:
            if entry.llm is not None:
                config = entry.llm.model_config
            elif is_downloadable(entry.spec.checkpoint) or is_downloadable(entry.spec.engine.tokenizer or ""):
                return cls()
            else:
                config = entry.spec.engine.resolve().model
            tensors = open_checkpoint(config.path).tensors.values()
            num_params = sum(math.prod(tensor.logical_shape) for tensor in tensors)
            stats = [(file.name, file.stat()) for file in weight_files(config.path)]
        except (QuireError, OSError):
            return cls()
        named = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
        return cls(
            config,
            num_params,
            sum(stat.st_size for _, stat in stats),
            max((stat.st_mtime for _, stat in stats), default=0.0),
            hashlib.sha256(named.encode()).hexdigest(),
            next((name for name, _ in Counter(t.block_type for t in tensors if t.block_type).most_common(1)), None),
        )

    @property
    def family(self) -> str:
        """The architecture's name in config.json, such as `qwen2`."""
        return "" if self.config is None else self.config.hf_config.text("model_type", "")

    def details(self) -> api.Details:
        """The details that several endpoints show."""
        if self.config is None:
            return api.Details()
        size = f"{self.num_params / 1e9:.1f}B" if self.num_params >= 1e9 else f"{self.num_params / 1e6:.1f}M"
        level = self.config.quantization or self.block_type or self.config.dtype
        return api.Details(
            family=self.family,
            families=[self.family],
            parameter_size=size,
            quantization_level=level.replace("float", "F").replace("bF", "BF").upper(),
            format="gguf" if is_gguf(self.config.path) else "safetensors",
        )


async def tags(request: Request) -> ASGIApp:
    """GET /api/tags"""
    listed: list[api.ListedModel] = []
    for entry in state_of(request).models.entries:
        facts = await asyncio.to_thread(_Facts.read, entry)
        common: dict[str, Any] = {
            "modified_at": rfc3339(facts.modified_s),
            "size": facts.num_bytes,
            "digest": facts.digest,
            "details": facts.details(),
        }
        listed += [
            api.ListedModel(name=name, model=name, **common) for name in (*entry.spec.names, *entry.adapter_names)
        ]
    return json_response(api.ModelList(listed))


async def ps(request: Request) -> ASGIApp:
    """GET /api/ps"""
    running = []
    for entry in state_of(request).models.entries:
        if entry.is_awake and entry.llm is not None:
            facts = await asyncio.to_thread(_Facts.read, entry)
            expires_at = _NEVER if entry.expires_at is None else rfc3339(entry.expires_at)
            running.append(
                api.RunningModel(
                    name=entry.name, model=entry.name, size=entry.num_bytes, digest=facts.digest,
                    details=facts.details(), expires_at=expires_at,
                    context_length=entry.llm.model_config.max_model_len,
                )
            )  # fmt: skip
    return json_response(api.RunningList(running))


async def show(request: Request) -> ASGIApp:
    """POST /api/show"""
    body, state = await read_struct(request, api.ShowRequest), state_of(request)
    entry = state.models.find(_name(body))
    return json_response(await asyncio.to_thread(_shown, entry, state.args))


def _shown(entry: ModelEntry, args: ServerArgs) -> api.ShownModel:
    facts = _Facts.read(entry)
    config = facts.config
    templates: Any = {}
    if config is not None:
        tokenizer = Tokenizer.from_path(config.tokenizer_path) if entry.llm is None else entry.llm.tokenizer
        templates = tokenizer.chat_templates
    template = templates.get("tool_use") or templates.get("default")
    generates = config is None or config.runner == "generate"
    formats = {
        "completion": generates,
        "embedding": config is not None and _embeds(entry, config),
        "tools": generates and choose_tool_format(args.tool_parser, template),
        "thinking": generates and choose_reasoning_format(args.reasoning_parser, template),
    }
    recommended = {} if config is None else config.generation_config
    return api.ShownModel(
        modelfile=f"FROM {entry.spec.checkpoint}",
        parameters="\n".join(f"{name} {recommended[name]}" for name in _RECOMMENDED if name in recommended),
        template=template or "",
        details=facts.details(),
        model_info=_model_info(facts),
        capabilities=[name for name, found in formats.items() if found],
        modified_at=rfc3339(facts.modified_s),
    )


def _embeds(entry: ModelEntry, config: ModelConfig) -> bool:
    """Whether the model makes embeddings, as far as the files of one that is not loaded say."""
    if entry.llm is not None:
        return entry.llm.pooler is not None and "embed" in entry.llm.pooler.tasks
    kind = POOLING_MODELS.get(config.architecture, "").rpartition(":")[2]
    embeds = config.convert == "embed" or kind in ("EMBED", "MULTI_EMBED")
    return embeds and read_cross_encoder(config.path) is None


def _model_info(facts: _Facts) -> dict[str, Any]:
    if facts.config is None:
        return {}
    hf, family = facts.config.hf_config, facts.family
    num_heads = hf.size("num_attention_heads")
    return {
        "general.architecture": family,
        "general.parameter_count": facts.num_params,
        f"{family}.context_length": facts.config.max_model_len,
        f"{family}.embedding_length": hf.size("hidden_size"),
        f"{family}.block_count": hf.size("num_hidden_layers"),
        f"{family}.attention.head_count": num_heads,
        f"{family}.attention.head_count_kv": hf.size("num_key_value_heads", num_heads),
    }


async def pull(request: Request) -> ASGIApp:
    """POST /api/pull: download a checkpoint from the hub, and serve it until the server ends."""
    body, state = await read_struct(request, api.PullRequest), state_of(request)
    name = _name(body).removesuffix(":latest")
    known = [entry.spec for entry in state.models.entries if name in entry.spec.names]
    if not known:
        state.models.check_new_name(name)
    if not known and not is_downloadable(name):
        raise invalid(f"model={name[:200]!r}: must be a served model or an id of the hub, such as 'org/name'", "model")
    first = state.models.entries[0].spec.engine
    new = dataclasses.replace(first, model=name, **_OF_ONE_MODEL)
    statuses = _pull(state, known[0] if known else ModelSpec((name,), new), is_new=not known)
    if body.stream is not False:
        lines = sse.framed(statuses, sse.json_line)
        return await sse.event_stream(request, lines, error_event=sse.error_line, keep_alive=b"", kind=sse.NDJSON)
    await sse.unless_disconnected(request, sse.read_all(statuses))
    return json_response(api.PullStatus("success"))


async def _pull(state: ServerState, spec: ModelSpec, *, is_new: bool) -> AsyncGenerator[api.PullStatus, None]:
    yield api.PullStatus("pulling manifest")
    download = Download()
    token = current_download.set(download)
    task = asyncio.create_task(asyncio.to_thread(spec.engine.resolve))  # with a copy of this context
    current_download.reset(token)
    what, digest = f"downloading {spec.checkpoint}", hashlib.sha256(spec.checkpoint.encode()).hexdigest()
    while not (await asyncio.wait({task}, timeout=_STATUS_S))[0]:
        total = download.total or None
        yield api.PullStatus(what, f"sha256:{digest}", total, None if total is None else download.num_bytes)
    try:
        task.result()
    except QuireError as error:
        raise ApiError(404, f"pull failed: {error}", code="pull_failed") from error
    if is_new and all(spec.name not in entry.spec.names for entry in state.models.entries):  # or pulled meanwhile
        state.models.add(spec)
    yield api.PullStatus("success")


def _name(body: api.ShowRequest | api.PullRequest) -> str:
    name = body.model or body.name
    if not name:
        raise invalid("model is required", "model")
    return name


async def version(request: Request) -> ASGIApp:
    """GET /api/version"""
    return json_response(Version(version=__version__))


async def delete(request: Request) -> ASGIApp:
    """DELETE /api/delete. Always raises ApiError (403)."""
    raise ApiError(403, "models are not deleted by requests: remove the checkpoint's files on the server")


ENDPOINTS = (
    Endpoint("/api/tags", "GET", tags, "List the models, in Ollama's form", response=api.ModelList),
    Endpoint("/api/ps", "GET", ps, "List the models that are loaded, in Ollama's form", response=api.RunningList),
    Endpoint(
        "/api/show", "POST", show, "Describe a model, in Ollama's form",
        request=api.ShowRequest, response=api.ShownModel,
    ),
    Endpoint(
        "/api/pull", "POST", pull, "Download a model from the hub", kind="admin",
        request=api.PullRequest, response=api.PullStatus, chunk=api.PullStatus,
    ),
    Endpoint("/api/version", "GET", version, "Show the version, in Ollama's form", response=Version),
    Endpoint("/api/delete", "DELETE", delete, "Refused: models are not deleted by requests", response=dict[str, Any]),
)  # fmt: skip
