"""ServerArgs: everything a user can say about the server, and the configuration file that holds it with EngineArgs."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quire.common.arguments.options import check_types, read_texts
from quire.common.arguments.vllm_arguments import formats, own_format, translate, vllm_arguments
from quire.common.errors import CheckpointError, ConfigError, check_choice, nearest_name
from quire.config.args import EngineArgs, arg
from quire.config.hf_config import check_file
from quire.config.machine import parse_bytes
from quire.server.models.spec import ModelSpec

LOG_FORMATS = ("text", "json")
_MAX_TEMPLATE_BYTES = 2**20
CONTENT_FORMATS = ("auto", "string", "openai")
REASONING_PARSERS = ("auto", "none", *formats("reasoning_parser"), "START...END")
TOOL_PARSERS = ("auto", "none", *formats("tool_parser"))
_AT_LEAST: Mapping[str, float] = {
    "max_prompts_per_request": 1, "max_choices_per_request": 1, "max_waiting": 0, "max_concurrent_per_tenant": 1,
    "requests_per_minute": 1, "tokens_per_minute": 1, "drain_timeout_s": 0, "response_store_max": 0,
    "hang_timeout_s": 3, "model_keep_alive_s": 0,
}  # fmt: skip
_MORE_THAN_0 = (
    "header_timeout_s",
    "body_timeout_s",
    "request_timeout_s",
    "keep_alive_s",
    "idle_timeout_s",
    "model_wait_s",
)
_BYTES = ("max_body_bytes", "max_header_bytes", "response_store_max_bytes")
_KEYS = ("api_key", "admin_key")
"""Arguments whose values no message quotes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """vLLM's names where the meaning is the same. Each field's help is its documentation and the CLI's."""

    host: str = arg("127.0.0.1", "address to listen on; one that other machines can reach requires an API key")
    port: int = arg(8000, "port to listen on; 0: any free port")
    uds: str | None = arg(None, "listen on this Unix socket instead of host and port")
    served_model_name: tuple[str, ...] = arg((), "names of the only model for clients; responses use the first")
    model_memory: int | str | None = arg(
        None, 'bytes for all models that are loaded, or text such as "8GiB"; none: what is free at the start'
    )
    model_keep_alive_s: float | None = arg(
        None, "seconds without use after which a model is put to sleep; none: only when its memory is needed"
    )
    model_wait_s: float = arg(300.0, "seconds that a request waits until its model is loaded")
    preload_models: bool = arg(False, "load all models at the start, instead of the first one only")
    lora_dir: str | None = arg(
        None, "folder below which /v1/load_lora_adapter finds adapters; none: requests cannot load adapters"
    )
    page: bool = arg(True, "serve the web page with the playground and the live view at /")

    api_key: tuple[str, ...] = arg((), "API keys; other users of this machine can see them")
    api_key_file: str | None = arg(None, "file of API keys, name:key on each line; the name becomes the tenant")
    admin_key: tuple[str, ...] = arg((), "keys for administration; other users of this machine can see them")
    admin_key_file: str | None = arg(None, "file of keys for administration, name:key on each line")
    allow_unauthenticated: bool = arg(False, "allow other machines to connect without an API key")
    guard_metrics: bool = arg(False, "require an API key for /metrics too")
    guard_health: bool = arg(False, "require an API key for /health and /ready too")
    allowed_hosts: tuple[str, ...] = arg(
        (), "accepted values of the Host header, * for any; none: names of this machine only, if no API key is required"
    )
    trusted_proxies: tuple[str, ...] = arg(
        (), "addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are used, * for any"
    )
    allowed_origins: tuple[str, ...] = arg((), "origins of web sites that may call this server (CORS), * for any")
    allow_credentials: bool = arg(False, "calls from those pages may carry cookies and credentials")
    ssl_certfile: str | None = arg(None, "TLS: file with the certificate chain, in PEM")
    ssl_keyfile: str | None = arg(None, "TLS: file with the private key, if it is not in the certificate's file")
    ssl_ca_certs: str | None = arg(None, "TLS: require client certificates signed by the authorities in this file")

    max_body_bytes: int | str = arg("32MiB", "maximum size of a request body")
    max_header_bytes: int | str = arg("64KiB", "maximum size of request line and headers")
    header_timeout_s: float = arg(10.0, "seconds within which request line and headers must be received")
    body_timeout_s: float = arg(60.0, "seconds within which a request body must be received")
    idle_timeout_s: float = arg(
        75.0, "seconds after which a connection is closed that sends no request or does not read its response"
    )
    request_timeout_s: float | None = arg(None, "seconds after which a request is aborted")
    hang_timeout_s: float | None = arg(
        8.0, "seconds (at least 3) after which an engine that is busy but makes no progress is replaced; none: never"
    )
    keep_alive_s: float = arg(15.0, "seconds without a token after which a stream sends a comment")
    max_prompts_per_request: int = arg(1024, "maximum number of prompts in one request")
    max_choices_per_request: int = arg(1024, "maximum of prompts times n, or times best_of, in one request")

    max_waiting: int = arg(1024, "maximum number of requests in the queue; further ones are refused (429)")
    max_concurrent_per_tenant: int | None = arg(None, "maximum number of simultaneous requests of one tenant")
    requests_per_minute: int | None = arg(None, "requests per minute of one tenant: an API key or an address")
    tokens_per_minute: int | None = arg(None, "tokens, of prompts and outputs, per minute of one tenant")
    drain_timeout_s: float = arg(30.0, "seconds that running requests may take to finish when the server stops")

    chat_template: str | None = arg(None, "chat template in place of the checkpoint's: a file, or the text itself")
    chat_template_content_format: str = arg(
        "auto", "form in which templates get content: string, openai (a list of parts), or auto: as they read it"
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = arg(
        None, "variables of the chat template that requests need not give, as a JSON object"
    )
    allow_client_chat_template: bool = arg(False, "let requests contain their own chat template")
    tool_parser: str = arg("auto", f"format of the model's tool calls: {', '.join(TOOL_PARSERS)}, or vLLM's name of it")
    reasoning_parser: str = arg(
        "auto",
        f"format of the model's reasoning: {', '.join(REASONING_PARSERS[:-1])}, vLLM's name of it, or two tags written "
        "START...END",
    )
    response_store: str | None = arg(None, "file for stored responses; none: kept in memory")
    response_store_max: int = arg(10_000, "maximum number of stored responses; the oldest are deleted first; 0: none")
    response_store_max_bytes: int | str = arg("256MiB", "maximum size of all stored responses with their inputs")

    log_format: str = arg("text", "format of the log: text, or json with one object per line")
    log_requests: bool = arg(True, "log a line for each request, without the text of prompts and responses")
    log_prompts: bool = arg(False, "log the bodies of requests too, including prompts")
    otlp_endpoint: str | None = arg(None, "send a trace of each request to this OpenTelemetry collector")

    def __post_init__(self) -> None:
        for name in _KEYS:
            if not isinstance(keys := getattr(self, name), tuple) or not all(isinstance(key, str) for key in keys):
                raise ConfigError(f"{name}: must be a text or a list of texts; put quotation marks around each key")
        check_types(self)
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), str) and "\0" in value:
                raise ConfigError(f"{field.name} has a NUL character, which no path, name or address may have")
        check_choice("log_format", self.log_format, LOG_FORMATS)
        check_choice("tool_parser", own_format("tool_parser", self.tool_parser), TOOL_PARSERS)
        reasoning_parser = own_format("reasoning_parser", self.reasoning_parser)
        if "..." not in reasoning_parser:
            check_choice("reasoning_parser", reasoning_parser, REASONING_PARSERS)
        check_choice("chat_template_content_format", self.chat_template_content_format, CONTENT_FORMATS)
        self.chat_template_text()
        for name, least in _AT_LEAST.items():
            if (value := getattr(self, name)) is not None and not least <= value < float("inf"):
                raise ConfigError(f"{name}={value}: must be at least {least}")
        for name in _MORE_THAN_0:
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value}: must be a number of seconds greater than 0")
        for name in _BYTES:
            if parse_bytes(name, getattr(self, name)) < 1024:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be at least 1024 bytes")
        if self.model_memory is not None:
            parse_bytes("model_memory", self.model_memory)
        self._check_listening()

    def chat_template_text(self) -> str | None:
        """The text of `chat_template`. Raises ConfigError for a file that cannot be read."""
        if self.chat_template is None or "{" in self.chat_template:
            return self.chat_template
        try:
            check_file(Path(self.chat_template), _MAX_TEMPLATE_BYTES)
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, CheckpointError) as error:
            raise ConfigError(f"chat_template={self.chat_template!r} cannot be read: {error}") from error

    def _check_listening(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: must be from 0 to 65535; 0 selects a free port")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("ssl_keyfile and ssl_ca_certs require ssl_certfile, the server's certificate")
        for proxy in self.trusted_proxies:
            if proxy != "*" and not _is_network(proxy):
                raise ConfigError(f"trusted_proxies has {proxy!r}: must be addresses, networks (10.0.0.0/8) or *")
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not re.fullmatch(r"[\w.+-]+://[^/?#*\s]+", origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}: must be as in https://example.org, without a path, or *"
                )
        if self.log_prompts and not self.log_requests:
            raise ConfigError("log_prompts requires log_requests: enable both or neither")
        guarded = [name for name in ("guard_metrics", "guard_health") if getattr(self, name)]
        if guarded and not self.has_api_key:
            raise ConfigError(f"{guarded[0]} requires API keys: set api_key_file, api_key or QUIRE_API_KEY")
        if self.allow_credentials and not self.allowed_origins:
            raise ConfigError("allow_credentials requires allowed_origins, the web sites that may call this server")
        if not self.allow_unauthenticated and not self.is_local and not self.has_api_key:
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, and no API key is configured: set "
                "api_key_file, api_key or QUIRE_API_KEY, or allow_unauthenticated if any client may use this server"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.uds is not None or is_loopback(self.host)

    @property
    def has_api_key(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_key or self.api_key_file or keys_in(os.environ.get("QUIRE_API_KEY", "")))

    @property
    def max_body(self) -> int:
        """max_body_bytes as a number."""
        return parse_bytes("max_body_bytes", self.max_body_bytes)

    @property
    def max_header(self) -> int:
        """max_header_bytes as a number."""
        return parse_bytes("max_header_bytes", self.max_header_bytes)


def keys_in(variable: str) -> list[str]:
    """The keys that the value of an environment variable lists, separated by commas."""
    return variable.replace(",", " ").split()


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine only. Names other than localhost are not looked up: False."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def merge_args(
    config_file: str | None, flags: Mapping[str, Any], models: Sequence[str] = ()
) -> tuple[ServerArgs, tuple[ModelSpec, ...]]:
    """The arguments of a configuration file (YAML, or TOML by its suffix) with flags over them, and the models.

    `models` are checkpoints, each as it is or as NAME=CHECKPOINT; they take precedence over those of the file. Raises
    ConfigError for a file that cannot be read, a name that is not an argument (suggesting the nearest) and a value of a
    wrong type or range.
    """
    given = ({} if config_file is None else _read_config_file(Path(config_file))) | dict(flags)
    listed = given.pop("models", None)
    if listed is not None and not models and given.get("model") is not None:
        raise ConfigError(f"model={given['model']!r} is given beside models: put it into models, with a name")
    if models:
        if flags.get("model") not in (None, *models[:1]):
            raise ConfigError(f"two models are given, {models[0]!r} and {flags['model']!r}: give one")
        listed, plain = _named(models), len(models) == 1 and models[0] in _named(models)
        if plain:
            given["model"], listed = models[0], None
    server_names, engine_names = ([f.name for f in dataclasses.fields(cls)] for cls in (ServerArgs, EngineArgs))
    known, others = server_names + engine_names, vllm_arguments("server").keys() | vllm_arguments("engine").keys()
    for name in given:
        if name not in known and name not in others:
            raise ConfigError(f"unknown argument {name!r}{nearest_name(name, known)}; docs/configuration.md lists all")
    of_server = {name: given.pop(name) for name in list(given) if name in (*server_names, *vllm_arguments("server"))}
    of_server = translate("server", of_server, server_names, ConfigError)
    args = ServerArgs(**{name: _tuple(value) for name, value in read_texts(ServerArgs, of_server).items()})
    if listed is not None:
        specs = _several(listed, given, args)
    else:
        check_types(engine := EngineArgs(**given))
        specs = (ModelSpec(args.served_model_name or (ModelSpec((), engine).checkpoint,), engine),)
    if args.lora_dir is not None and not any(spec.engine.enable_lora for spec in specs):
        raise ConfigError(f"lora_dir={args.lora_dir!r} requires enable_lora: adapters are used by models that have it")
    return args, _with_distinct_names(specs)


def _with_distinct_names(specs: tuple[ModelSpec, ...]) -> tuple[ModelSpec, ...]:
    """The models. Raises ConfigError for a name that cannot be one, and if an adapter has that of a model or of another
    model's adapter."""
    taken = set[str]()
    for spec in specs:
        for name in spec.names:
            if not name.strip() or re.search(r"[\x00-\x1f\x7f]", name) or spec.names.count(name) > 1:
                raise ConfigError(f"the model name {name!r} must be given once, not empty, without control characters")
        for name in (request.lora_name for request in spec.engine.lora_requests()):
            if name in taken or any(other.has_name(name) for other in specs):
                raise ConfigError(f"lora_modules: the name {name!r} is taken by a model or another adapter")
            taken.add(name)
    return specs


def _named(models: Sequence[str]) -> dict[str, str]:
    """Checkpoints by their names: the part before `=`, or else the checkpoint itself."""
    named: dict[str, str] = {}
    for text in models:
        name, equals, checkpoint = text.partition("=")
        if not equals or Path(text).is_dir():
            name = checkpoint = text
        if not name or not checkpoint:
            raise ConfigError(f"the model {text!r} must be a folder, a hub id, or NAME=FOLDER with both parts")
        if name in named:
            raise ConfigError(f"two models have the name {name!r}: give them different ones, as in NAME=FOLDER")
        named[name] = checkpoint
    return named


def _several(listed: Any, common: Mapping[str, Any], args: ServerArgs) -> tuple[ModelSpec, ...]:
    """The models by name, each with the engine's common arguments and its own over them."""
    if not isinstance(listed, dict) or not listed:
        raise ConfigError("models must contain names and checkpoints, such as `small: quire-tiny`")
    if args.served_model_name:
        raise ConfigError("served_model_name cannot be combined with named models: their names are those in `models`")
    specs = []
    for name, own in listed.items():
        own = {"model": own} if isinstance(own, str) else own
        if not isinstance(own, dict) or "model" not in own:
            raise ConfigError(f"models: {str(name)!r} must be a checkpoint, or engine arguments that include `model`")
        try:
            engine = EngineArgs(**{**common, **{str(key).replace("-", "_"): value for key, value in own.items()}})
            check_types(engine)
        except ConfigError as error:
            raise ConfigError(f"models: {str(name)!r}: {error}") from error
        specs.append(ModelSpec((str(name),), engine))
    return tuple(specs)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the library has no types
    """Refuses a name that occurs twice in a mapping, of which PyYAML would use the last and drop the others."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """The mapping at this place of the file. Raises ComposerError."""
        node: Any = super().compose_mapping_node(anchor)
        names = set[str]()
        for name in [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]:
            if name.value in names:
                raise yaml.composer.ComposerError(None, None, f"{name.value!r} occurs twice", name.start_mark)
            names.add(name.value)
        return node


def _read_config_file(path: Path) -> dict[str, Any]:
    """Names may be written as flags are, with dashes. A list may be a single text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _Loader)
    except Exception as error:  # PyYAML raises any exception for a value that does not fit its tag
        raise ConfigError(f"the configuration file {str(path)!r} cannot be read: {_fault(error)}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration file {str(path)!r} must contain names and values, such as `port: 8000`")
    lists = {f.name for f in dataclasses.fields(ServerArgs) if str(f.type) == "tuple[str, ...]"}
    spelt = [str(name).replace("-", "_") for name in values]
    if twice := [name for name in spelt if spelt.count(name) > 1]:
        raise ConfigError(f"the configuration file {str(path)!r} has {twice[0]!r} twice, with dashes and without")
    named = dict(zip(spelt, values.values(), strict=True))
    return {name: [value] if name in lists and isinstance(value, str) else value for name, value in named.items()}


def _fault(error: Exception) -> str:
    """What is wrong with a configuration file. PyYAML's own message quotes lines of it, which may contain keys."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error)


def describe_args(args: ServerArgs, *models: ModelSpec) -> str:
    """The arguments that are not at their defaults, a line each as in a configuration file; keys are left out."""
    lines = [f"{name}: {value}" for name, value in _changed([args, *(spec.engine for spec in models)])]
    if len(models) > 1:
        lines = [f"{name}: {value}" for name, value in _changed([args])] + ["models:"]
        for spec in models:
            values = "".join(f"\n    {name}: {value}" for name, value in _changed([spec.engine]))
            lines.append(f"  {spec.name}:{values}")
    return "\n".join(lines) or "all arguments at their defaults"


def _changed(args: Iterable[ServerArgs | EngineArgs]) -> Iterable[tuple[str, Any]]:
    for each in args:
        for field in dataclasses.fields(each):
            value = getattr(each, field.name)
            if value == field.default:
                continue
            if field.name in _KEYS:
                value = f"({len(value)} not shown)"
            elif field.name == "otlp_endpoint":
                value = re.sub("//.*@", "//(not shown)@", value)
            elif isinstance(value, tuple):
                value = f"[{', '.join(value)}]"
            yield field.name, value
