"""vLLM's arguments: each is Quire's too, or it is listed what becomes of it."""

import contextlib
import copy
import dataclasses
import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from quire import (
    BeamSearchParams,
    ConfigError,
    EngineArgs,
    InvalidParamsError,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.common import log
from quire.common.arguments.vllm_arguments import vllm_arguments
from quire.config.checkpoint.runners import PoolerConfig
from quire.config.speculative import SpeculativeConfig
from quire.server.api.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    choose_reasoning_format,
    choose_tool_format,
)
from quire.server.config import ServerArgs, merge_args

VLLM = json.loads((Path(__file__).parents[1] / "data" / "vllm_arguments.json").read_text())
ENGINE, SERVER = ([field.name for field in dataclasses.fields(kind)] for kind in (EngineArgs, ServerArgs))
KINDS = [
    ("engine", "EngineArgs", (*ENGINE,)),
    ("server", "FrontendArgs", (*SERVER, "lora_modules")),
    ("sampling", "SamplingParams", SamplingParams.__struct_fields__),
    ("structured", "StructuredOutputsParams", StructuredOutputsParams.__struct_fields__),
    ("beam", "BeamSearchParams", BeamSearchParams.__struct_fields__),
    ("pooling", "PoolingParams", PoolingParams.__struct_fields__),
]


@pytest.mark.parametrize(("kind", "name", "own"), KINDS)
def test_every_argument_of_vllm_is_known(kind, name, own):
    assert len(VLLM[name]) > 8
    assert set(VLLM[name]) <= {*own, *vllm_arguments(kind)}
    assert not set(own) & vllm_arguments(kind).keys(), "listed although Quire has it"


@pytest.mark.parametrize(("kind", "name", "own"), KINDS)
def test_what_becomes_of_an_argument_is_said(kind, name, own):
    for argument in vllm_arguments(kind).values():
        assert argument.verdict in ("ignored", "refused", "renamed")
        assert (argument.to in own) == (argument.verdict == "renamed")
        assert bool(argument.reason) == (argument.verdict != "renamed")
        assert not argument.allowed or argument.verdict == "refused"


def test_arguments_that_make_no_difference_are_accepted_in_one_line(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level("INFO", logger="quire")
    given = {"enforce_eager": True, "trust_remote_code": True, "load_format": "auto", "device": "cpu"}
    assert EngineArgs(max_num_seqs=3, **given, speculative_config=None) == EngineArgs(max_num_seqs=3)
    (record,) = caplog.records
    assert record.getMessage().startswith("without effect here: enforce_eager (nothing is compiled")
    assert all(name in record.getMessage() for name in given)


@pytest.mark.parametrize("configure", [log.show_messages, partial(log.set_up_logging, "json")])
def test_what_is_said_of_arguments_before_logging_is_configured_is_said_then(configure, capsys, monkeypatch):
    for target in map(logging.getLogger, ("", "quire", "uvicorn.error")):
        monkeypatch.setattr(target, "handlers", [])
        for field in ("propagate", "level"):
            monkeypatch.setattr(target, field, getattr(target, field))  # put back what is configured
    monkeypatch.setattr(log, "chosen_format", None)
    EngineArgs(enforce_eager=True)
    SpeculativeConfig.read({"suffix_decoding_max_spec_factor": 1})
    assert capsys.readouterr().err == ""
    configure()
    enforced, of_drafts = capsys.readouterr().err.splitlines()
    assert "without effect here: enforce_eager (nothing is compiled" in enforced
    assert "suffix_decoding_max_spec_factor of speculative_config" in of_drafts
    EngineArgs(enforce_eager=True)
    assert "enforce_eager" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"load_format": "pt"}, "load_format='pt' is not supported: checkpoints are safetensors"),
        ({"master_port": 2}, "master_port='2' is not supported: give it in master_addr, as HOST:PORT"),
        ({"data_parallel_rank": 2}, "data_parallel_rank='2' is not supported: engines, ranks and stages are arranged"),
        ({"spec_method": "ngram"}, "speculative_config says how tokens are drafted"),
        ({"device": "cuda"}, "Quire runs on CPUs"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling=.* is not supported: give it in hf_overrides"),
        ({"rope_theta": 1e6}, "rope_theta=.* is not supported: give it in hf_overrides"),
        ({"numa_bind": True}, "numa_bind='?True'? is not supported: use numactl, or cpu_list"),
        ({"max_num_seq": 4}, "unknown argument 'max_num_seq', did you mean 'max_num_seqs'"),
    ],
)
def test_arguments_that_ask_for_something_else_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        EngineArgs(**given)


def test_arguments_with_another_name_are_passed_on():
    assert EngineArgs(kv_cache_memory_bytes=2**26).kv_cache_memory == 2**26
    assert EngineArgs(kv_cache_memory_bytes=None).kv_cache_memory is None
    mean = EngineArgs(override_pooler_config={"pooling_type": "MEAN"}).pooler_config
    assert mean == {"pooling_type": "MEAN"}
    chosen = EngineArgs(pooler_config=PoolerConfig(pooling_type="MEAN")).pooler_config
    assert PoolerConfig.read(chosen or {}) == PoolerConfig(pooling_type="MEAN")


def test_paths_and_torch_dtypes_are_taken():
    args = EngineArgs(model=Path("a") / "b", dtype=torch.bfloat16)
    assert (args.model, args.dtype) == ("a/b", "bfloat16")
    assert EngineArgs(device=torch.device("cpu")) == EngineArgs()


def test_a_servers_arguments():
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "disable_log_stats": True, "port": 1}
    flags |= {"fingerprint_mode": "none", "enable_tokenizer_info_endpoint": True}
    server, (spec,) = merge_args(None, flags | {"max_num_seqs": 2})
    assert server == ServerArgs(tool_parser="hermes", port=1)
    assert spec.engine == EngineArgs(max_num_seqs=2)
    with pytest.raises(ConfigError, match=r"middleware=.* a reverse proxy does this: docs/how-to/reverse-proxy.md"):
        merge_args(None, {"middleware": ["a.b"]})
    with pytest.raises(ConfigError, match=r"enable_ssl_refresh=.* files of certificates are read again after SIGHUP"):
        merge_args(None, {"enable_ssl_refresh": True})
    with pytest.raises(ConfigError, match="fingerprint_mode='full' is not supported"):
        merge_args(None, {"fingerprint_mode": "full"})


def test_sampling_parameters_that_ask_for_nothing_are_accepted():
    assert SamplingParams(temperature=0.5, flat_logprobs=False, extra_args=None) == SamplingParams(temperature=0.5)
    structure = StructuredOutputsParams(regex="a", structural_tag=None)
    assert SamplingParams(guided_decoding=structure).structured_outputs == structure
    with pytest.raises(InvalidParamsError, match="thinking_token_budget='5' is not supported"):
        SamplingParams(thinking_token_budget=5)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: SamplingParams(temprature=1), "unknown parameter 'temprature', did you mean 'temperature'"),
        (lambda: BeamSearchParams(beam_width=2, max_token=4), "did you mean 'max_tokens'"),
        (lambda: StructuredOutputsParams(jsn="{}"), "did you mean 'json'"),
    ],
)
def test_an_unknown_parameter_suggests_the_nearest(made, said):
    with pytest.raises(InvalidParamsError, match=said):
        made()


def test_an_assignment_is_checked_and_a_wrong_one_changes_nothing():
    params = SamplingParams(temperature=0.5, max_tokens=5)
    params.temperature = 0.7
    assert params == SamplingParams(temperature=0.7, max_tokens=5)
    with pytest.raises(InvalidParamsError, match="temperature=-1"):
        params.temperature = -1
    with pytest.raises(InvalidParamsError, match="min_tokens"):
        params.min_tokens = 6
    with pytest.raises(AttributeError):
        params.temprature = 1
    assert params == SamplingParams(temperature=0.7, max_tokens=5)


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    clone = params.clone()
    clone.stop.append("b")
    clone.logit_bias[2] = 1.0
    clone.temperature = 0.0
    assert params == SamplingParams(stop=["a"], logit_bias={1: 2.0}) == copy.copy(params)


def test_none_stands_for_the_default_but_for_the_length():
    assert SamplingParams.from_optional(n=None, temperature=None, top_p=0.5) == SamplingParams(top_p=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None


def test_fields_of_a_beam_search_may_be_given_by_place():
    by_name = BeamSearchParams(beam_width=2, max_tokens=4)
    assert BeamSearchParams(2, 4) == by_name == BeamSearchParams(2, 4, watermarking=None)


def test_fields_that_are_missing_or_doubled_are_type_errors():
    every = {name: getattr(BeamSearchParams(2, 4), name) for name in BeamSearchParams.__struct_fields__}
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams(2, **every)
    with pytest.raises(TypeError, match="max_tokens"):
        BeamSearchParams(2)


@pytest.mark.parametrize(
    ("name", "known", "choose"),
    [
        ("tool_parser", TOOL_FORMATS, choose_tool_format),
        ("reasoning_parser", REASONING_FORMATS, choose_reasoning_format),
    ],
)
def test_every_parser_of_vllm_is_read_or_refused_by_name(name, known, choose):
    read = set()
    for parser in VLLM[f"{name}s"]:
        with contextlib.suppress(ConfigError):
            assert choose(parser, None) in known.values()
            ServerArgs(**{name: parser})
            read.add(parser)
    for parser in {*VLLM[f"{name}s"]} - read:
        for refuse in (lambda parser=parser: choose(parser, None), lambda parser=parser: ServerArgs(**{name: parser})):
            with pytest.raises(ConfigError, match=f"^{name}='{parser}': this format is not supported .available: "):
                refuse()
    assert read > {"tool_parser": {"mistral", "hermes", "qwen3_json"}, "reasoning_parser": {"qwen3", "mistral"}}[name]


def test_parsers_of_vllm_are_quires_formats():
    assert choose_tool_format("granite4", None) is TOOL_FORMATS["hermes"]
    assert choose_tool_format("llama4_json", None) is TOOL_FORMATS["llama3_json"]
    assert choose_reasoning_format("deepseek_r1", None) is REASONING_FORMATS["think"]
    assert merge_args(None, {"tool_call_parser": "qwen3_json", "enable_auto_tool_choice": True})[0].tool_parser
    with pytest.raises(ConfigError, match="tool_parser='xlam'"):
        merge_args(None, {"tool_call_parser": "xlam"})
