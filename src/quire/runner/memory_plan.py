"""How the machine's memory will be used, worked out before a single weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire import kernels
from quire.common.errors import ConfigError, OutOfMemoryError
from quire.config.args import EngineArgs, EngineConfig
from quire.config.checkpoint.safetensors import SINGLE_FILE
from quire.config.kv_cache import DTYPE_BYTES, MAX_BLOCKS_PER_SEQ, KVCacheConfig, KVCacheSpec, NoCacheSpec
from quire.config.kv_layout import kv_cache_config
from quire.config.machine import DiskSpeed, MachineMemory, disk_speed, format_bytes, machine_memory
from quire.config.parallel import ParallelConfig
from quire.config.quantization import QUANT_METHOD
from quire.models.activations import activation_bytes
from quire.models.adapters.slots import adapter_reserve
from quire.models.base import Model
from quire.models.registry import class_of
from quire.models.weights.usage import WeightUse, weight_use
from quire.runner.parallel.pipeline.planning import divided, own_stage_configs
from quire.runner.parallel.placing import check_ranks
from quire.runner.sampling.sampler import MAX_LOGITS_ROWS
from quire.text.tokenizer.same_tokens import check_same_tokens

DEFAULT_KV_CACHE_LIMIT = 4 * 1024**3
"""taken at most when the user names no size: memory people expect to have left for other programs"""
_GROWTH_BYTES = 64 * 1024**2
"""kept free for what grows beside the plan under load, such as the processes that try grammars (47 MiB measured)"""
_CACHE_SHARE_BESIDE_FILES = 0.25
"""of the memory that is left, taken at most if weights stay in the file, of which the rest keeps as many as it can"""


@dataclass(frozen=True, slots=True)
class FileWeights:
    """Weights that stay in the file: the memory that nothing else takes keeps those that were read last."""

    num_bytes: int
    token_bytes: int
    """The most that one token reads of them. Several tokens at once read at most all."""
    disk: DiskSpeed
    are_experts: bool
    """Whether these are the experts of a mixture. Of a dense model they are all quantized matrices."""

    @property
    def token_s(self) -> float:
        """The time of a token whose weights in the file all have to be read from the disk."""
        return self.token_bytes / self.disk.bytes_per_s


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the bytes go, and what they buy."""

    config: EngineConfig
    kv_cache: KVCacheConfig
    machine: MachineMemory
    weight_bytes: int
    """All weights."""
    activation_bytes: int
    adapter_bytes: int = 0
    """Kept for LoRA adapters."""
    in_file: FileWeights | None = None
    """The weights that stay in the file. None: all are in memory."""

    @property
    def num_ranks(self) -> int:
        """Processes of this machine that compute each step together. All sizes are those of all of them."""
        parallel = self.config.parallel
        return parallel.own_ranks * max(1, len(parallel.own_stages))

    @property
    def rank_bytes(self) -> int:
        """What one of them needs, about."""
        return -(-self.total_bytes // self.num_ranks)

    @property
    def resident_weight_bytes(self) -> int:
        """The weights that are in memory."""
        return self.weight_bytes - (0 if self.in_file is None else self.in_file.num_bytes)

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output."""
        return self.config.model.max_model_len

    @property
    def kv_cache_dtype(self) -> str:
        """The dtype of keys and values."""
        wanted = self.config.cache.dtype
        return self.config.model.dtype if wanted == "auto" else wanted

    @property
    def total_bytes(self) -> int:
        """Weights in memory, adapters, activations, KV cache and host tier together."""
        others = self.resident_weight_bytes + self.adapter_bytes + self.activation_bytes
        return others + self.kv_cache.total_bytes + self.kv_cache.host_bytes

    @property
    def max_concurrency(self) -> float:
        """Sequences of max_model_len tokens that the cache holds at once."""
        return self.kv_cache.num_blocks / max(1, self.kv_cache.blocks_to_hold(self.max_model_len))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.config.model.model,
            "architecture": self.config.model.architecture,
            "model_impl": self.config.model.model_impl,
            "dtype": self.config.model.dtype,
            "quantization": self.config.model.quantization,
            "machine_limit_bytes": self.machine.limit_bytes,
            "machine_available_bytes": self.machine.available_bytes,
            "weight_bytes": self.weight_bytes,
            "resident_weight_bytes": self.resident_weight_bytes,
            "in_file": None if self.in_file is None else dataclasses.asdict(self.in_file),
            "adapter_bytes": self.adapter_bytes,
            "activation_bytes": self.activation_bytes,
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_cache_bytes": self.kv_cache.total_bytes,
            "swap_bytes": self.kv_cache.host_bytes,
            "kv_bytes_per_token": self.kv_cache.bytes_per_token,
            "num_blocks": self.kv_cache.num_blocks,
            "block_size": self.kv_cache.block_size,
            "kv_cache_tokens": self.kv_cache.max_tokens if self.kv_cache.is_length_bounded else None,
            "max_model_len": self.max_model_len,
            "max_concurrency": round(self.max_concurrency, 2),
            "tensor_parallel_size": self.config.parallel.tensor_parallel_size,
            "pipeline_parallel_size": self.config.parallel.pipeline_parallel_size,
            "stages": self.config.parallel.stages,
            "rank_bytes": self.rank_bytes,
        }

    def __str__(self) -> str:
        model, cache = self.config.model, self.kv_cache
        library = ["transformers' modules"] if model.model_impl == "transformers" else []
        weights = [f"{model.quantization} weights"] if model.quantization else []
        kinds = [model.architecture, *library, model.dtype, *weights]
        capacity = f"{cache.max_tokens} tokens in {self.kv_cache_dtype}, {cache.bytes_per_token:.0f} bytes each"
        if not cache.is_length_bounded:
            most = cache.blocks_to_hold(self.max_model_len)
            capacity = f"in {self.kv_cache_dtype}; a sequence holds at most {most}, however long it is"
        available, limit = format_bytes(self.machine.available_bytes), format_bytes(self.machine.limit_bytes)
        blocks = f"{cache.num_blocks} blocks of {cache.block_size}"
        swap = {"swap space": f"{format_bytes(cache.host_bytes)} = {cache.num_host_blocks} blocks"}
        rows = {
            "model": f"{model.model} ({', '.join(kinds)})",
            "memory": f"{available} of {limit} free",
            "weights": f"{format_bytes(self.resident_weight_bytes)}{' in memory' if self.in_file else ''}",
            **self._drafts_row(),
            **self._file_rows(),
            **self._adapter_row(),
            "activations": f"{format_bytes(self.activation_bytes)} at most",
            "KV cache": f"{format_bytes(cache.total_bytes)} = {blocks}, {capacity}",
            **(swap if cache.num_host_blocks else {}),
            "context": f"{self.max_model_len} tokens, {self.max_concurrency:.1f} such sequences at once",
        }
        if cache.keeps_nothing:
            rows |= {"KV cache": "none: texts run whole", "context": f"{self.max_model_len} tokens"}
        if stages := self.config.parallel.stages:
            layers = ", ".join(f"{first} to {end - 1}" for first, end in stages)
            of_last = "; this machine has the last" if len(self.config.parallel.own_stages) < len(stages) else ""
            rows["stages"] = f"{len(stages)}, of the layers {layers}{of_last}"
        if (parallel := self.config.parallel).num_machines > 1:
            rows["machines"] = f"{parallel.num_machines}, with {parallel.tensor_parallel_size} ranks; this one's count"
        if self.num_ranks > 1:
            rows["ranks"] = (
                f"{self.num_ranks} processes, in which all this is counted; each needs about "
                f"{format_bytes(self.rank_bytes)}"
            )
        return "\n".join(f"{name:<12}{text}" for name, text in rows.items())

    def _file_rows(self) -> dict[str, str]:
        if self.in_file is None:
            return {}
        kept = min(self.in_file.num_bytes, max(0, self.machine.available_bytes - self.total_bytes))
        disk = self.in_file.disk
        token, speed = format_bytes(self.in_file.token_bytes), f"{format_bytes(int(disk.bytes_per_s))}/s"
        what = "experts" if self.in_file.are_experts else "weights"
        return {
            "experts"
            if self.in_file.are_experts
            else "from file": f"{format_bytes(self.in_file.num_bytes)} in the file, of which the system can keep about "
            f"{format_bytes(kept)} in memory",
            "a token": f"reads {token} of {what}, at worst all from the disk: {self.in_file.token_s:.2g} s at {speed} "
            f"({'measured' if disk.is_measured else 'assumed'})",
        }

    def _drafts_row(self) -> dict[str, str]:
        draft = self.config.draft
        return {} if draft is None else {"drafts": f"by {draft.drafter}, counted in each row"}

    def _adapter_row(self) -> dict[str, str]:
        lora = self.config.lora
        if lora is None:
            return {}
        return {"adapters": f"{format_bytes(self.adapter_bytes)} for {lora.max_loras} of rank {lora.max_lora_rank}"}


def plan_memory(args: EngineArgs) -> MemoryPlan:
    """Resolve `args` and share out the memory. Reads the checkpoint's config and headers, no weights.

    If the weights do not fit, those of a folder that `quire quantize` saved stay in the file (of a mixture its experts,
    of a dense model all quantized matrices), unless weights_from_file says otherwise; then some pieces of the file are
    read, to measure how fast that is.

    Raises ConfigError, CheckpointError, or OutOfMemoryError where no block, or not the max_model_len asked for, fits.
    """
    config = args.resolve()
    check_ranks(config)
    check_same_tokens(config.model, config.draft)
    config = divided(config)
    try:
        return _plan(args, config)
    except OutOfMemoryError as error:
        if config.draft is None:
            raise
        in_rank = weight_use(config.draft, _first_rank(config)).num_bytes + _draft_activation_bytes(config)
        size = format_bytes(in_rank * config.parallel.own_ranks)
        raise OutOfMemoryError(
            f"{error}. For drafts, {config.draft.drafter} takes {size} for weights and activations, and a part of each "
            "block of the cache; speculative_config={'method': 'off'} frees them"
        ) from None


def _plan(args: EngineArgs, config: EngineConfig) -> MemoryPlan:
    """As plan_memory, of resolved arguments."""
    weights = _weight_use(config)
    try:
        return _share_out(args, config, weights)
    except OutOfMemoryError as error:
        is_saved, limit = config.model.quant_method == QUANT_METHOD, config.cache.memory_limit_bytes
        is_too_large = weights.num_bytes > machine_memory().limited(limit).limit_bytes
        can_stay = config.model.weights_from_file == "auto" and config.parallel.executor_name == "in_process"
        if not can_stay or not (weights.expert_bytes or is_saved or is_too_large):
            raise
        if not is_saved:
            name, what = config.model.model, "experts" if weights.expert_bytes else "weights"
            raise OutOfMemoryError(
                f"{error}. Or save the model with `quire quantize {name} FOLDER --quantization int4`, which needs "
                f"little memory, and give FOLDER as the model: its {what} can stay in the file"
            ) from None
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, weights_from_file="always"))
        return _share_out(args, config, _weight_use(config))


def _weight_use(config: EngineConfig) -> WeightUse:
    """Of the model, and of the draft model if there is one, in all ranks of this machine."""
    ranks = _first_rank(config)
    use, *others = [weight_use(stage.model, ranks) for stage in own_stage_configs(config)]
    num_bytes = use.num_bytes + sum(each.num_bytes for each in others)
    if config.draft is not None:
        try:
            num_bytes += weight_use(config.draft, ranks).num_bytes
        except ConfigError as error:  # which ranks cannot divide
            raise ConfigError(f"speculative_config: {config.draft.drafter}: {error}") from error
    return dataclasses.replace(use, num_bytes=num_bytes * config.parallel.own_ranks)


def _draft_activation_bytes(config: EngineConfig) -> int:
    """Of the draft model or head in a rank, with the hidden states that a head reads; 0 without one."""
    if config.draft is None:
        return 0
    of_draft = dataclasses.replace(config, model=config.draft, lora=None)
    num_bytes, head = _activation_bytes(class_of(config.draft), of_draft, [of_draft]), config.draft.head
    num_elements = 0 if head is None else head.state_elements * config.scheduler.max_num_batched_tokens
    return num_bytes + num_elements * DTYPE_BYTES[config.model.dtype]


def _first_rank(config: EngineConfig) -> kernels.Ranks | None:
    """The rank that has most; None if there is only one process."""
    return None if config.parallel.tensor_parallel_size == 1 else kernels.Ranks(config.parallel.shard(0))


def _share_out(args: EngineArgs, config: EngineConfig, weights: WeightUse) -> MemoryPlan:
    """Raises OutOfMemoryError as plan_memory."""
    model = class_of(config.model)
    config = _with_whole_sequences(config, model.kv_cache_specs(config.model))
    machine = machine_memory().limited(config.cache.memory_limit_bytes)
    num_ranks = config.parallel.own_ranks
    stages, ranks = own_stage_configs(config), _first_rank(config)
    lora, adapters = config.lora, 0
    if lora is not None:
        adapters = sum(adapter_reserve(stage.model, lora, ranks) for stage in stages)
    activations = _activation_bytes(model, config, stages) + _draft_activation_bytes(config)
    adapters, activations = adapters * num_ranks, activations * num_ranks
    least_tokens = 0 if args.fits_model_len else config.model.max_model_len
    share = 1.0 if weights.file_bytes == 0 else _CACHE_SHARE_BESIDE_FILES
    others = weights.num_bytes - weights.file_bytes + adapters + activations
    cache = _kv_cache(model, config, machine, others, share, least_tokens)
    if cache.max_tokens < config.model.max_model_len:
        if not args.fits_model_len:
            larger = "kv_cache_memory" if args.num_gpu_blocks_override is None else "num_gpu_blocks_override"
            raise OutOfMemoryError(
                f"max_model_len={config.model.max_model_len} does not fit into a KV cache of {cache.max_tokens} tokens "
                f"({format_bytes(cache.total_bytes)}): lower max_model_len or raise {larger}"
            )
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=cache.max_tokens))
    return MemoryPlan(config, cache, machine, weights.num_bytes, activations, adapters, _in_file(config, weights))


def _in_file(config: EngineConfig, weights: WeightUse) -> FileWeights | None:
    if weights.file_bytes == 0:
        return None
    speed = disk_speed(config.model.path / SINGLE_FILE)
    return FileWeights(weights.file_bytes, weights.token_file_bytes, speed, weights.expert_bytes > 0)


def _with_whole_sequences(config: EngineConfig, specs: list[KVCacheSpec]) -> EngineConfig:
    """If no layer keeps anything, sequences run whole: a step must have room for the longest."""
    scheduler = config.scheduler
    if not all(isinstance(spec, NoCacheSpec) for spec in specs):
        return config
    num_tokens = max(scheduler.max_num_batched_tokens, config.model.max_model_len)
    return dataclasses.replace(config, scheduler=dataclasses.replace(scheduler, max_num_batched_tokens=num_tokens))


def _activation_bytes(model: type[Model], config: EngineConfig, stages: Sequence[EngineConfig]) -> int:
    """The peak of a step: a forward pass of all tokens in all stages, and of a model that generates float32 logits for
    all sequences and for a chunk of those whose log-probabilities are wanted."""
    num_tokens, ranks = config.scheduler.max_num_batched_tokens, _first_rank(config)
    forward = sum(activation_bytes(stage.model, num_tokens, config.lora, ranks) for stage in stages)
    if config.model.runner == "pooling":
        return forward
    # One for each sample, also where one token of a prompt has several, and for each draft.
    scheduler = config.scheduler
    num_logits = scheduler.max_num_seqs + scheduler.max_draft_rows + MAX_LOGITS_ROWS
    return forward + num_logits * config.model.vocab_size * 4 * model.num_logits_alive


def _kv_cache(
    model: type[Model], config: EngineConfig, machine: MachineMemory, others: int, share: float, least_tokens: int
) -> KVCacheConfig:
    """The cache beside what takes `others`. If no size is named, it gets a share of what is left (without memory_limit,
    of all but _GROWTH_BYTES, or of a quarter if that is more), or more where it needs that for `least_tokens`."""
    cache, specs = config.cache, _kv_cache_specs(model, config)
    what = "weights and activations" if config.lora is None else "weights, adapters and activations"
    where = "this machine's" if cache.memory_limit_bytes is None else "the memory_limit of"
    if cache.swap_bytes + others > machine.limit_bytes:
        change = "lower swap_space" if cache.swap_bytes else "free memory, raise memory_limit if that is set"
        raise OutOfMemoryError(
            f"{what} ({format_bytes(others)}) and swap_space of {format_bytes(cache.swap_bytes)} do not fit into "
            f"{where} {format_bytes(machine.limit_bytes)}: {change}, lower max_num_batched_tokens and max_num_seqs, "
            "or take a smaller model"
        )
    layout: dict[str, Any] = {"host_bytes": cache.swap_bytes, "max_chunk": config.scheduler.max_num_batched_tokens}
    layout |= {"draft_specs": _draft_specs(config), **_processes(config.parallel)}
    if cache.num_blocks_override is not None:
        result = kv_cache_config(specs, cache.block_size, num_blocks=cache.num_blocks_override, **layout)
    else:
        is_limited = cache.memory_limit_bytes is not None
        left = machine.for_plans(1.0 if is_limited else cache.memory_utilization, 0) - others - cache.swap_bytes
        wanted = cache.kv_cache_bytes
        if wanted is None:
            sequence = _bytes_of_sequences(model, config, 1, least_tokens)
            useful = _bytes_of_sequences(model, config, config.scheduler.max_num_seqs, config.model.max_model_len)
            most = left if is_limited else max(left - _GROWTH_BYTES, left // 4)
            wanted = min(left, max(int(most * share), sequence), DEFAULT_KV_CACHE_LIMIT, useful)
        result = kv_cache_config(specs, cache.block_size, num_bytes=wanted, **layout)
    if result.total_bytes + cache.swap_bytes + others > machine.limit_bytes:
        raise OutOfMemoryError(
            f"{what} ({format_bytes(others)}), a KV cache of {format_bytes(result.total_bytes)} "
            f"and swap space of {format_bytes(cache.swap_bytes)} do not fit into {where} "
            f"{format_bytes(machine.limit_bytes)}: lower kv_cache_memory or swap_space"
        )
    return result


def _processes(of: ParallelConfig) -> dict[str, Any]:
    """The processes that share the cache, as `kv_cache_config` takes them."""
    return {"num_ranks": of.tensor_parallel_size, "num_machines": of.num_machines, "stages": of.own_stages}


def _kv_cache_specs(model: type[Model], config: EngineConfig) -> list[KVCacheSpec]:
    """The model's, in the dtype that the user wants."""
    specs = model.kv_cache_specs(config.model)
    return specs if config.cache.dtype == "auto" else [spec.with_dtype(config.cache.dtype) for spec in specs]


def _draft_specs(config: EngineConfig) -> list[KVCacheSpec]:
    """Those of the draft model, none without one."""
    if config.draft is None:
        return []
    return _kv_cache_specs(class_of(config.draft), dataclasses.replace(config, model=config.draft))


def _bytes_of_sequences(model: type[Model], config: EngineConfig, num_seqs: int, num_tokens: int) -> int:
    """Bytes for sequences of this number of tokens. More than max_num_seqs of max_model_len could never be filled."""
    specs = _kv_cache_specs(model, config)
    layout: dict[str, Any] = {"draft_specs": _draft_specs(config), **_processes(config.parallel)}
    cache = kv_cache_config(specs, config.cache.block_size, num_blocks=MAX_BLOCKS_PER_SEQ, **layout)
    return num_seqs * cache.blocks_to_hold(num_tokens) * cache.block_bytes
