"""EngineArgs: each argument reaches the configuration that it belongs to, and a wrong one is refused by name."""

import argparse
import dataclasses
from dataclasses import dataclass, fields
from types import SimpleNamespace

import huggingface_hub
import pytest

from quire.common.arguments.options import check_types
from quire.common.errors import ConfigError, UnsupportedModelError
from quire.common.lora import LoRARequest
from quire.config import args as args_module
from quire.config.args import EngineArgs, arg
from quire.config.cache import CacheConfig
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.parallel import NodesConfig, ParallelConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import SpeculativeConfig


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
        pinned_fraction=0.1, kv_cache_dtype="int8", memory_limit="2MiB",
    )  # fmt: skip
    assert args.resolve().cache == CacheConfig(
        block_size=8, kv_cache_bytes=1024**2, num_blocks_override=None, memory_utilization=0.5,
        enable_prefix_caching=False, swap_bytes=3 * 1024**3 // 2, pinned_fraction=0.1, dtype="int8",
        memory_limit_bytes=2 * 1024**2,
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


def test_engines_and_machines_are_used():
    assert EngineArgs(data_parallel_size=3).resolve().parallel == ParallelConfig(None, data_parallel_size=3)
    given = {"nnodes": 2, "node_rank": 1, "master_addr": "a:5", "master_secret_file": "file"}
    stages = EngineArgs(**given, pipeline_parallel_size=2, tensor_parallel_size=4).resolve().parallel
    assert stages.nodes == NodesConfig(2, 1, "a", 5, "file")
    ranks = EngineArgs(**given, tensor_parallel_size=4).resolve().parallel
    assert ranks.nodes == NodesConfig(2, 1, "a", 5, "file", num_ranks=4)


@pytest.mark.parametrize("disabled", [False, True])
def test_requests_are_measured_unless_that_is_disabled(disabled):
    assert EngineArgs(disable_log_stats=disabled).resolve().measures_requests is not disabled


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({}, False),
        ({"distributed_executor_backend": "mp"}, False),
        ({"distributed_executor_backend": "ray"}, True),
        ({"distributed_executor_backend": "ray", "ray_address": "auto"}, True),
        ({"data_parallel_size": 2}, True),
    ],
)
def test_several_engines_and_those_on_a_cluster_have_processes_of_their_own(given, own):
    args = EngineArgs(**given)
    assert args.has_own_processes is own
    assert args.resolve().parallel.backend == given.get("distributed_executor_backend", "mp")


def test_adapters_are_used():
    modules = {"a": "/a=1", "b": "/b"}
    args = EngineArgs(enable_lora=True, max_loras=2, max_lora_rank=4, lora_memory="1KiB", lora_modules=modules)
    assert args.lora_requests() == (LoRARequest("a", 1, "/a=1"), LoRARequest("b", 2, "/b"))
    assert args.resolve().lora == LoRAConfig(2, 4, 1024)
    listed = EngineArgs(enable_lora=True, lora_modules=[{"name": "a", "path": "/a"}, ' {"name": "b", "path": "/b"}'])
    assert listed.lora_requests() == (LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b"))
    assert EngineArgs(max_loras=2).resolve().lora is None
    for wrong, message in (
        ({"enable_lora": False}, "lora_modules require enable_lora"),
        ({"lora_modules": ["a=/a", "a=/b"]}, "lora_modules: two adapters have the name 'a'"),
        ({"lora_modules": ["a"]}, 'lora_modules=\'a\': must be NAME=FOLDER or {"name": NAME, "path": FOLDER, '),
        ({"lora_memory": "much"}, "lora_memory='much': must be a number of bytes"),
        ({"memory_limit": "much"}, "memory_limit='much': must be a number of bytes"),
    ):
        with pytest.raises(ConfigError) as refused:
            dataclasses.replace(args, **wrong).resolve()
        assert str(refused.value).startswith(message)


def test_a_command_line_has_an_option_for_each_argument_and_may_have_others():
    parser = argparse.ArgumentParser()
    parser.add_argument("--other")
    assert EngineArgs.add_cli_args(parser) is parser
    given = ["--other", "x", "--max-num-seqs", "3", "--no-enable-prefix-caching"]
    options = parser.parse_args(given)
    assert EngineArgs.from_cli_args(options) == EngineArgs(max_num_seqs=3, enable_prefix_caching=False)
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs()
    assert parser.parse_args([]).block_size == 16, "with its default"


# The draft model


def test_the_draft_model_is_found_as_its_config_says(monkeypatch):
    calls, draft = [], ModelConfig.resolve("quire-draft")
    monkeypatch.setattr(args_module, "draft_model", lambda *given: calls.append(given) or draft)
    given = {"model": "quire-draft", "num_speculative_tokens": 2}
    config = EngineArgs(speculative_config=given).resolve()
    assert config.draft is draft
    assert config.speculative == SpeculativeConfig("draft_model", 2, model="quire-draft")
    assert config.scheduler.max_draft_rows == 0, "256 sequences leave no row"
    EngineArgs(speculative_config=given | {"method": "draft_model"}).resolve()
    assert calls == [(config.model, config.speculative, has_method) for has_method in (False, True)]


def test_a_draft_head_says_its_method_itself(monkeypatch):
    head = SimpleNamespace(format=SimpleNamespace(method="eagle3"))
    draft = dataclasses.replace(ModelConfig.resolve("quire-draft"), head=head)
    monkeypatch.setattr(args_module, "draft_model", lambda *given: draft)
    config = EngineArgs(speculative_config={"model": "quire-draft"}).resolve()
    assert config.speculative == SpeculativeConfig("eagle3", model="quire-draft")


class Speculators:
    """Stands for a checkpoint `head` whose config.json names the model that it drafts for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models = {None, "quire-tiny"}
        self.known = {"head": ("quire-tiny", {"method": "ngram", "num_speculative_tokens": 3})}
        resolve = ModelConfig.resolve
        monkeypatch.setattr(ModelConfig, "resolve", lambda model, **given: self.check(model) or resolve(model, **given))
        monkeypatch.setattr(args_module, "verifier_of", self.known.get)

    def check(self, model):
        if model not in self.models:
            raise UnsupportedModelError(f"{model} is no model")


def test_a_head_that_names_its_model_may_be_given_as_the_model(monkeypatch):
    Speculators(monkeypatch)
    config = EngineArgs(model="head", max_num_seqs=4).resolve()
    assert config.model.model == "quire-tiny"
    assert config.speculative == SpeculativeConfig("ngram", 3)
    assert config.scheduler.max_num_seqs == 4
    given = {"num_speculative_tokens": 5}
    assert EngineArgs(model="head", speculative_config=given).resolve().speculative == SpeculativeConfig("ngram", 5)
    off = EngineArgs(model="head", speculative_config={"method": "off"}).resolve()
    assert (off.model.model, off.speculative) == ("quire-tiny", SpeculativeConfig("off")), "without the head"


@pytest.mark.parametrize("given", [{"model": "other"}, {"model": "head", "speculative_config": {"model": "x"}}])
def test_what_is_no_model_and_names_none_is_refused(given, monkeypatch):
    Speculators(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=f"{given['model']} is no model"):
        EngineArgs(**given).resolve()


def test_the_embedded_model_is_never_taken_for_a_head(monkeypatch):
    speculators = Speculators(monkeypatch)
    speculators.known[None] = ("quire-tiny", {})
    speculators.models.remove(None)
    with pytest.raises(UnsupportedModelError, match="None is no model"):
        EngineArgs().resolve()


def test_each_argument_of_the_models_files_is_passed_on(monkeypatch):
    found, calls = ModelConfig.resolve(None), []
    monkeypatch.setattr(ModelConfig, "resolve", lambda *given, **named: calls.append((given, named)) or found)
    given = {
        "tokenizer": "t", "dtype": "float32", "quantization": "int4", "revision": "r", "gguf_file": "g",
        "download_dir": "d", "hf_overrides": {"a": 1}, "override_generation_config": {"b": 2}, "model_impl": "quire",
        "head_quantization": "int8", "weights_from_file": "never", "runner": "generate", "convert": "none",
        "pooler_config": {"task": "embed"},
    }  # fmt: skip
    EngineArgs(model="m", **given).resolve()
    EngineArgs().resolve()
    defaults = {
        "dtype": "auto", "hf_overrides": {}, "override_generation_config": {}, "model_impl": "auto",
        "weights_from_file": "auto", "runner": "auto", "convert": "auto", "pooler_config": {},
    }  # fmt: skip
    assert calls == [(("m",), given), ((None,), dict.fromkeys(given) | defaults)]


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
        ({"max_model_len": "100x"}, "max_model_len='100x': must be a number of tokens"),
        ({"max_model_len": 2049}, "max_model_len=2049 is longer than the checkpoint's 2048 positions"),
        ({"max_logprobs": -2}, "max_logprobs=-2: must be 0 or more, or -1"),
        ({"swap_space": -1e-9}, "swap_space=-1e-09: must be a number of GiB"),
        (
            {"swap_space": 2.0**33},
            "swap_space=8589934592.0: must be a number of GiB, 0 or more, within this machine's ",
        ),
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
