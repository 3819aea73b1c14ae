"""EngineArgs: each argument reaches the configuration that it belongs to, and a wrong one is refused by name."""

from dataclasses import dataclass, fields

import huggingface_hub
import pytest

from quire.common.errors import ConfigError
from quire.config.args import EngineArgs, arg, check_types
from quire.config.cache import CacheConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.config.scheduler import SchedulerConfig


def test_the_defaults_resolve_to_the_defaults_of_each_configuration():
    config = EngineArgs().resolve()
    assert config.model == ModelConfig.resolve(None)
    assert config.cache == CacheConfig(16, None, None, 0.9, enable_prefix_caching=True)
    assert config.scheduler == SchedulerConfig(256, 2048)
    assert config.parallel == ParallelConfig(None)
    assert (config.seed, config.max_logprobs, config.logprobs_mode) == (0, 20, "raw_logprobs")


def test_each_argument_of_the_cache_is_used():
    args = EngineArgs(
        block_size=8, kv_cache_memory="1MiB", gpu_memory_utilization=0.5, enable_prefix_caching=False, swap_space=1.5,
        pinned_fraction=0.1, kv_cache_dtype="int8",
    )  # fmt: skip
    assert args.resolve().cache == CacheConfig(
        block_size=8, kv_cache_bytes=1024**2, num_blocks_override=None, memory_utilization=0.5,
        enable_prefix_caching=False, swap_bytes=3 * 1024**3 // 2, pinned_fraction=0.1, dtype="int8",
    )  # fmt: skip
    assert EngineArgs(num_gpu_blocks_override=5).resolve().cache.num_blocks_override == 5


def test_each_argument_of_the_scheduler_is_used():
    args = EngineArgs(
        max_num_seqs=3, max_num_batched_tokens=77, preemption_mode="swap", scheduling_policy="fair",
        priority_aging_s=2.5, tenant_weights={"a": 2}, prefix_max_delay_s=4.5, target_step_ms=6.5,
    )  # fmt: skip
    assert args.resolve().scheduler == SchedulerConfig(
        max_num_seqs=3, max_num_batched_tokens=77, preemption_mode="swap", policy="fair", priority_aging_s=2.5,
        tenant_weights={"a": 2}, prefix_max_delay_s=4.5, target_step_ms=6.5, max_draft_rows=3 * 8,
    )  # fmt: skip


def test_threads_seed_and_logprobs_are_used():
    config = EngineArgs(num_threads=3, seed=9, max_logprobs=-1, logprobs_mode="processed_logits").resolve()
    assert config.parallel == ParallelConfig(3)
    assert (config.seed, config.max_logprobs, config.logprobs_mode) == (9, -1, "processed_logits")
    ranks = EngineArgs(tensor_parallel_size=2).resolve().parallel
    assert (ranks.tensor_parallel_size, ranks.executor_name, config.parallel.executor_name) == (
        2,
        "ranks",
        "in_process",
    )
    stages = EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=3).resolve().parallel
    assert (stages.pipeline_parallel_size, stages.executor_name, stages.nodes) == (3, "pipeline", None)


def test_each_argument_of_the_model_is_used():
    config = EngineArgs(model="quire-draft", tokenizer="quire-tiny", dtype="float32", quantization="int4").resolve()
    assert config.model == ModelConfig.resolve(
        "quire-draft", tokenizer="quire-tiny", dtype="float32", quantization="int4"
    )


def test_a_hub_id_is_downloaded_at_its_revision_into_the_given_folder(monkeypatch):
    calls = []

    def download(name, revision, cache_dir, **kwargs):
        calls.append((name, revision, cache_dir))
        return str(ModelConfig.resolve("quire-draft").path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    EngineArgs(model="some/model", revision="v2", download_dir="folder").resolve()
    assert calls == [("some/model", "v2", "folder")] * 2, "first its config.json alone"


@pytest.mark.parametrize("given", ["auto", "none", "vllm"])
def test_sampling_defaults_are_those_of_the_checkpoint_unless_turned_off(given):
    model = EngineArgs(generation_config=given).resolve().model
    assert model.generation_config == (ModelConfig.resolve(None).generation_config if given == "auto" else {})
    assert model.generation_config or given != "auto"


@pytest.mark.parametrize(("given", "length"), [(None, 2048), ("auto", 2048), (1, 1), (100, 100), (2048, 2048)])
def test_the_length_is_that_of_the_model_or_the_one_given(given, length):
    args = EngineArgs(max_model_len=given)
    assert args.resolve().model.max_model_len == length
    assert args.fits_model_len is not isinstance(given, int)


@pytest.mark.parametrize("swap_space", [0, 0.0, 2.0**33 - 2**-19])
def test_the_ends_of_the_swap_space_are_in_its_range(swap_space):
    assert EngineArgs(swap_space=swap_space).resolve().cache.swap_bytes == swap_space * 1024**3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_model_len": 0}, 'max_model_len=0: must be a number of tokens, or "auto"'),
        ({"max_model_len": "100"}, "max_model_len='100': must be a number of tokens"),
        ({"max_model_len": 2049}, "max_model_len=2049 is longer than the checkpoint's 2048 positions"),
        ({"max_logprobs": -2}, "max_logprobs=-2: must be 0 or more, or -1"),
        ({"swap_space": -1e-9}, "swap_space=-1e-09: must be a number of GiB"),
        ({"swap_space": 2.0**33}, "swap_space=8589934592.0: must be a number of GiB"),
        ({"swap_space": float("nan")}, "swap_space=nan: must be a number of GiB"),
        ({"kv_cache_memory": 1024, "num_gpu_blocks_override": 1}, "kv_cache_memory and num_gpu_blocks_override both"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory='lots': must be a number of bytes"),
        ({"generation_config": "nome"}, "generation_config='nome', did you mean 'none'"),
        ({"logprobs_mode": "raw_logit"}, "logprobs_mode='raw_logit', did you mean 'raw_logits'"),
        ({"block_size": 1.5}, "block_size=1.5: must be int, not float"),
        ({"block_size": True}, "block_size=True: must be int, not bool"),
        ({"swap_space": "1"}, "swap_space='1': must be float, not str"),
        ({"tenant_weights": ("a",)}, "tenant_weights=('a',): must be dict or None, not texts"),
        ({"max_model_len": 5.0}, "max_model_len=5.0: must be int or str or None, not float"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype=None: must be str, not None"),
        ({"ray_address": "auto"}, "ray_address='auto' requires distributed_executor_backend='ray'"),
        ({"distributed_executor_backend": "slurm"}, "distributed_executor_backend='slurm'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(args, message):
    with pytest.raises(ConfigError) as raised:
        EngineArgs(**args).resolve()
    assert str(raised.value).startswith(message)


def test_arguments_are_made_from_their_names_and_an_unknown_one_suggests_the_nearest():
    args = EngineArgs(seed=3, dtype="float32")
    assert (args.seed, args.dtype, args.model) == (3, "float32", None)
    with pytest.raises(ConfigError) as raised:
        EngineArgs(max_num_seq=4)
    assert str(raised.value).startswith(
        "unknown argument 'max_num_seq', did you mean 'max_num_seqs'? (allowed: model, tokenizer, revision, "
    )


def test_an_argument_is_declared_with_its_default_and_its_help():
    @dataclass
    class Args:
        size: int = arg(5, "how large")

    (field,) = fields(Args)
    assert Args().size == 5
    assert field.metadata["help"] == "how large"


def test_a_list_of_texts_holds_nothing_else():
    @dataclass
    class Args:
        names: "tuple[str, ...]"

    for names in ((), ("a", "b")):
        check_types(Args(names))
    for names in (("a", 1), ["a"], "a"):
        with pytest.raises(ConfigError, match=r"^names=.*: must be texts, not (tuple|list|str)$"):
            check_types(Args(names))
