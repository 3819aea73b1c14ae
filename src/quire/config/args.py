"""EngineArgs: all arguments of an engine in one flat list."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from quire.common.arguments.options import add_field_arguments, check_types, read_texts
from quire.common.arguments.vllm_arguments import translate, vllm_arguments, whole_number
from quire.common.errors import ConfigError, InvalidParamsError, UnsupportedModelError, check_choice
from quire.common.lora import LoRARequest
from quire.common.params import LOGPROBS_MODES, LogprobsMode
from quire.config.cache import CacheConfig
from quire.config.checkpoint.draft_heads import verifier_of
from quire.config.checkpoint.runners import PoolerConfig
from quire.config.lora import LoRAConfig
from quire.config.machine import format_bytes, machine_memory, parse_bytes
from quire.config.model import ModelConfig
from quire.config.parallel import ANY_CPU, BACKENDS, NodesConfig, ParallelConfig, parse_cpu_list
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import AUTOMATIC, SpeculativeConfig, draft_model

_LORA_KEYS = {"name": "lora_name", "path": "lora_path"}
"""What vLLM's objects in lora_modules call the fields of LoRARequest."""
_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)


def arg(default: Any, doc: str) -> Any:
    """Declare a field with its default and its help text."""
    return field(default=default, metadata={"help": doc})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The resolved arguments of an engine: one config per subsystem."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    seed: int
    max_logprobs: int
    """Largest number of log-probabilities per token that a request may ask for; -1 for any number."""
    logprobs_mode: LogprobsMode
    measures_requests: bool = False
    """Whether an engine in the caller's process measures its requests."""
    lora: LoRAConfig | None = None
    """None: no request has an adapter."""
    speculative: SpeculativeConfig = AUTOMATIC
    draft: ModelConfig | None = None
    """The draft model; None without one."""


class _NamesChecked(type):
    """Accepts vLLM's other names where they make no difference, and values that mean the same: a path, a torch dtype,
    texts that `read_texts` reads."""

    def __call__(cls, **given: Any) -> Any:
        own = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        plain = {name: _plain(value) for name, value in given.items()}
        kept = read_texts(cls, translate("engine", plain, own, ConfigError))
        drafting = kept.get("speculative_config")
        if isinstance(drafting, str) or drafting is False:
            drafting = {"method": drafting}
        if isinstance(drafting, Mapping) and drafting.get("method") is False:  # YAML makes that of `off`
            drafting = {**drafting, "method": "off"}
        kept["speculative_config"] = drafting
        if isinstance(modules := kept.get("lora_modules"), list | Mapping):
            kept["lora_modules"] = tuple(_listed_modules(modules))
        return super().__call__(**kept)


def _listed_modules(modules: Any) -> Iterator[Any]:
    """Yield the adapters of a list or a mapping as texts."""
    listed = [f"{name}={path}" for name, path in modules.items()] if isinstance(modules, Mapping) else modules
    for module in listed:
        yield json.dumps(module) if isinstance(module, dict) else module


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, PoolerConfig):
        return dataclasses.asdict(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs(metaclass=_NamesChecked):
    """Arguments of an engine, under vLLM's names where the meaning is the same. The CLI shows each field's help.

    Arguments that only vLLM has are accepted where they make no difference (docs/migrating.md). Raises ConfigError for
    other names, and for values that ask for something that Quire does not have.
    """

    model: str | None = arg(
        None,
        "checkpoint folder, .gguf file, hub id (org/name, or org/name:Q4_K_M for its GGUF file), or quire-tiny / "
        "quire-draft; none: quire-tiny",
    )
    tokenizer: str | None = arg(None, "folder or hub id of the tokenizer; none: the model's")
    revision: str | None = arg(None, "branch, tag or commit of a hub id")
    download_dir: str | None = arg(None, "folder for downloads from the hub")
    gguf_file: str | None = arg(None, "name of a GGUF file in the folder or hub id, or the end of it such as Q4_K_M")
    model_impl: str = arg(
        "auto",
        "whose modules run the model: quire, transformers (quire[transformers]), or auto: quire's where there are any",
    )
    runner: str = arg(
        "auto", "generate, pooling (embeddings, scores, classes), or auto: what the architecture and its files say"
    )
    convert: str = arg(
        "auto", "what a generating architecture becomes for pooling: embed, classify, reward or none; auto: embed"
    )
    pooler_config: Mapping[str, Any] | None = arg(
        None, 'how a model that pools makes vectors, as in {"pooling_type": "MEAN"}; none: as its files say'
    )
    dtype: str = arg("auto", "auto, bfloat16 or float32; float16 checkpoints compute in bfloat16")
    quantization: str | None = arg(None, "int8 or int4: quantize the weights while they are loaded; none: do not")
    head_quantization: str | None = arg(
        None, "int8: quantize the output head while it is loaded, where the checkpoint has it in plain numbers"
    )
    weights_from_file: str = arg(
        "auto",
        "experts, or all matrices of a dense model, of a folder that `quire quantize` saved: auto (read from the file "
        "when they are needed, if the model does not fit into memory), always, or never (all are copied to memory)",
    )
    max_model_len: int | str | None = arg(
        None, 'largest length of prompt + output, in tokens; none, "auto" or -1: what the model and the cache allow'
    )
    block_size: int = arg(16, "token slots per KV cache block")
    kv_cache_memory: int | str | None = arg(
        None, 'KV cache size in bytes, or text such as "64MiB"; none: the memory left but 64 MiB, at most 4 GiB'
    )
    kv_cache_dtype: str = arg(
        "auto", "auto (the model's dtype), or int8: about half of bfloat16's memory, nearly as exact"
    )
    num_gpu_blocks_override: int | None = arg(None, "number of KV cache blocks, regardless of the memory")
    gpu_memory_utilization: float = arg(0.9, "share of the machine's memory that the engine may use in total")
    memory_limit: int | str | None = arg(
        None, 'bytes for weights, activations, caches and swap space, or text such as "2GiB"; none: what is available'
    )
    swap_space: float = arg(0.0, "GiB of host memory for swapped-out requests and evicted cached blocks")
    preemption_mode: str | None = arg(None, "swap or recompute; none: the one with the lower estimated cost")
    enable_prefix_caching: bool = arg(True, "reuse the KV cache of equal prompt prefixes")
    pinned_fraction: float = arg(0.25, "largest share of the KV cache blocks that pinned prefixes may use")
    max_num_seqs: int = arg(256, "largest number of sequences that run at once")
    max_num_batched_tokens: int = arg(2048, "largest number of tokens computed in one step")
    target_step_ms: float | None = arg(
        None, "split prompts into chunks so small that a step takes about this many milliseconds"
    )
    scheduling_policy: str = arg(
        "fcfs", "order in which requests start: fcfs, priority, fair (between tenants) or prefix (longest hit first)"
    )
    priority_aging_s: float = arg(10.0, "policy priority: seconds of waiting that count as much as one level")
    tenant_weights: Mapping[str, float] | None = arg(
        None, "policy fair: shares of tenants, as in a=2,b=0.5; 1 for a tenant not listed"
    )
    prefix_max_delay_s: float = arg(2.0, "policy prefix: seconds for which later requests may overtake a request")
    data_parallel_size: int = arg(
        1, "engines, each in a process of its own with its share of CPUs and memory, among which requests are spread"
    )
    distributed_executor_backend: str | None = arg(
        None, "where engines run: mp (processes of this machine) or ray (actors of a Ray cluster, quire[ray]); none: mp"
    )
    ray_address: str | None = arg(
        None,
        "Ray cluster, as HOST:PORT, auto (the one that runs on this machine) or local (one is started for this "
        "process alone); none: RAY_ADDRESS, or else local",
    )
    tensor_parallel_size: int = arg(1, "processes that compute each step together, each with a part of the model")
    pipeline_parallel_size: int = arg(1, "stages of layers, each in tensor_parallel_size processes of its own")
    enable_expert_parallel: bool = arg(False, "with tensor_parallel_size: whole experts in each process")
    nnodes: int = arg(1, "machines that compute each step together, each with a stage or a part of the ranks")
    node_rank: int = arg(0, "number of this machine; machine 0 serves, and the others connect to it")
    master_addr: str | None = arg(None, "HOST:PORT at which machine 0 waits for the others; the same on all machines")
    master_secret_file: str | None = arg(
        None, "file with the secret that each machine must prove to have; none: QUIRE_MASTER_SECRET"
    )
    num_threads: int | None = arg(None, "threads of the kernels, in each process; none: one for each CPU it may use")
    cpu_list: str | None = arg(
        None, "CPUs, as in 0,2-3, each with one thread pinned to it; any: no pinning; none: pin only ranks and stages"
    )
    hf_overrides: Mapping[str, Any] | None = arg(None, "values that replace those of config.json, as a JSON object")
    override_generation_config: Mapping[str, Any] | None = arg(
        None, "values that replace those of generation_config.json, as a JSON object"
    )
    disable_log_stats: bool = arg(True, "do not measure requests for LLM.get_metrics; a server always measures them")
    generation_config: str = arg(
        "auto", "sampling defaults: auto, those of the checkpoint's generation_config.json; none, Quire's own"
    )
    max_logprobs: int = arg(20, "largest number of log-probabilities per token in a request; -1: any number")
    logprobs_mode: str = arg(
        "raw_logprobs",
        "raw_logprobs or raw_logits: as the model computed them; processed_logprobs or processed_logits: after "
        "penalties, bias and sampling cuts",
    )
    seed: int = arg(0, "seed from which requests without a seed get theirs")
    speculative_config: Mapping[str, Any] | None = arg(
        None,
        'how tokens are drafted, as in {"method": "ngram", "num_speculative_tokens": 4}; none: by looking up what '
        'followed earlier, where that saves time; {"method": "off"}: not',
    )
    enable_lora: bool = arg(False, "allow requests to use LoRA adapters")
    lora_modules: tuple[str, ...] = arg(
        (), 'adapters that are known from the start, each NAME=FOLDER or {"name": NAME, "path": FOLDER}; also hub ids'
    )
    max_loras: int = arg(8, "largest number of adapters that are loaded at once; requests for others wait")
    max_lora_rank: int = arg(16, "largest rank of an adapter")
    lora_memory: int | str | None = arg(
        None, 'bytes for all adapters that are loaded, or text such as "64MiB"; none: max_loras of the largest rank'
    )

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """Add one option for each argument, and return the parser. See FlexibleArgumentParser for those of vLLM."""
        add_field_arguments(parser, EngineArgs, "engine", with_defaults=True)
        return parser

    @classmethod
    def from_cli_args(cls, options: argparse.Namespace) -> EngineArgs:
        """Make arguments of parsed options, which may include others that are not the engine's."""
        names = {*vllm_arguments("engine"), *(field.name for field in dataclasses.fields(cls))}
        return cls(**{name: value for name, value in vars(options).items() if name in names})

    def resolve(self) -> EngineConfig:
        """Check all arguments and read the checkpoint's config. Raises ConfigError or CheckpointError."""
        check_types(self)
        try:
            model = self._model()
        except UnsupportedModelError:
            given = self.speculative_config or {}
            if self.model is None or "model" in given or (verifier := verifier_of(self.model)) is None:
                raise
            is_used = given.get("method", verifier[1]["method"]) == verifier[1]["method"]
            drafting = {**verifier[1], **given} if is_used else given
            return dataclasses.replace(self, model=verifier[0], speculative_config=drafting).resolve()
        speculative = SpeculativeConfig.read(self.speculative_config or {})
        draft = draft_model(model, speculative, "method" in (self.speculative_config or {}))
        if draft is not None and draft.head is not None:
            speculative = dataclasses.replace(speculative, method=draft.head.format.method)
        return EngineConfig(
            model=model,
            cache=self._cache(),
            scheduler=SchedulerConfig(
                self.max_num_seqs,
                self.max_num_batched_tokens,
                self.preemption_mode,
                policy=self.scheduling_policy,
                priority_aging_s=self.priority_aging_s,
                tenant_weights=self.tenant_weights or {},
                prefix_max_delay_s=self.prefix_max_delay_s,
                target_step_ms=self.target_step_ms,
                max_draft_rows=speculative.num_rows(self.max_num_seqs, self.max_num_batched_tokens),
            ),
            parallel=ParallelConfig(
                self.num_threads,
                self.tensor_parallel_size,
                data_parallel_size=self.data_parallel_size,
                pipeline_parallel_size=self.pipeline_parallel_size,
                enable_expert_parallel=self.enable_expert_parallel,
                nodes=NodesConfig.read(
                    self.nnodes,
                    self.node_rank,
                    self.master_addr,
                    self.master_secret_file,
                    self.pipeline_parallel_size,
                    self.tensor_parallel_size,
                ),
                cpus=() if self.cpu_list is None else parse_cpu_list(self.cpu_list),
                pins_ranks=self.cpu_list != ANY_CPU,
                backend=self._backend(),
            ),
            seed=self.seed,
            max_logprobs=self._max_logprobs(),
            logprobs_mode=check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES),
            measures_requests=not self.disable_log_stats,
            lora=self._lora(),
            speculative=speculative,
            draft=draft,
        )

    def _model(self) -> ModelConfig:
        overridden = self.override_generation_config or {}
        model = ModelConfig.resolve(
            self.model,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            quantization=self.quantization,
            revision=self.revision,
            gguf_file=self.gguf_file,
            download_dir=self.download_dir,
            hf_overrides=self.hf_overrides or {},
            override_generation_config=overridden,
            model_impl=self.model_impl,
            head_quantization=self.head_quantization,
            weights_from_file=self.weights_from_file,
            runner=self.runner,
            convert=self.convert,
            pooler_config=self.pooler_config or {},
        )
        words = ("auto", "none", "vllm")  # the last is vLLM's word for `none`
        is_chosen = check_choice("generation_config", self.generation_config, words) != "auto"
        generation = overridden if is_chosen else model.generation_config
        return dataclasses.replace(model, max_model_len=self._wanted_model_len(model), generation_config=generation)

    def _cache(self) -> CacheConfig:
        if self.kv_cache_memory is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError("kv_cache_memory and num_gpu_blocks_override both set the cache's size: give one")
        return CacheConfig(
            block_size=self.block_size,
            kv_cache_bytes=_bytes("kv_cache_memory", self.kv_cache_memory),
            num_blocks_override=self.num_gpu_blocks_override,
            memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=self.enable_prefix_caching,
            swap_bytes=self._swap_bytes(),
            memory_limit_bytes=_bytes("memory_limit", self.memory_limit),
            pinned_fraction=self.pinned_fraction,
            dtype=self.kv_cache_dtype,
        )

    def _max_logprobs(self) -> int:
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs={self.max_logprobs}: must be 0 or more, or -1 for any number")
        return self.max_logprobs

    def _lora(self) -> LoRAConfig | None:
        if not self.enable_lora:
            if self.lora_modules:
                raise ConfigError("lora_modules require enable_lora")
            return None
        self.lora_requests()
        return LoRAConfig(self.max_loras, self.max_lora_rank, _bytes("lora_memory", self.lora_memory))

    def lora_requests(self) -> tuple[LoRARequest, ...]:
        """The adapters of `lora_modules`, with ids from 1. Raises ConfigError if one is wrong, or two have one name."""
        requests: dict[str, LoRARequest] = {}
        for place, text in enumerate(self.lora_modules, start=1):
            name, _, path = text.partition("=")
            try:
                given = json.loads(text) if text.lstrip().startswith("{") else {"name": name, "path": path}
                renamed: dict[str, Any] = {_LORA_KEYS.get(key, key): value for key, value in given.items()}
                request = LoRARequest(**renamed, lora_int_id=place)
            except (ValueError, TypeError, InvalidParamsError) as error:
                example = '{"name": NAME, "path": FOLDER, "base_model_name": NAME}'
                raise ConfigError(f"lora_modules={text!r}: must be NAME=FOLDER or {example}: {error}") from error
            if request.lora_name in requests:
                raise ConfigError(f"lora_modules: two adapters have the name {request.lora_name!r}")
            requests[request.lora_name] = request
        return tuple(requests.values())

    def _swap_bytes(self) -> int:
        if not 0 <= self.swap_space < 2**33:  # 2**63 bytes
            memory = format_bytes(machine_memory().limit_bytes)
            raise ConfigError(
                f"swap_space={self.swap_space}: must be a number of GiB, 0 or more, within this machine's {memory}"
            )
        return int(self.swap_space * 1024**3)

    def _backend(self) -> str:
        """Where engines run. Raises ConfigError for an unknown place, and for an address that would not be used."""
        backend = check_choice("distributed_executor_backend", self.distributed_executor_backend or "mp", BACKENDS)
        if self.ray_address is not None and backend != "ray":
            raise ConfigError(f"ray_address={self.ray_address!r} requires distributed_executor_backend='ray'")
        return backend

    @property
    def has_own_processes(self) -> bool:
        """Whether the engines always run in processes of their own."""
        return self.data_parallel_size > 1 or self.distributed_executor_backend == "ray"

    @property
    def fits_model_len(self) -> bool:
        """Whether max_model_len may be reduced to what fits into the cache, because no number was given."""
        return self.max_model_len in (None, "auto", -1)

    def _wanted_model_len(self, model: ModelConfig) -> int:
        if self.fits_model_len:
            return model.max_model_len
        length = whole_number(str(self.max_model_len)) or 0
        if length < 1:
            raise ConfigError(f'max_model_len={self.max_model_len!r}: must be a number of tokens, or "auto"')
        if length > model.max_context_len:
            raise ConfigError(
                f"max_model_len={length} is longer than the checkpoint's {model.max_context_len} positions"
            )
        return length


def _bytes(name: str, given: str | int | None) -> int | None:
    return None if given is None else parse_bytes(name, given)
