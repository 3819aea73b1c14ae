"""Module names and command lines of programs that were written for vLLM."""

import importlib
import importlib.util
import logging
from pathlib import Path

import pytest

import quire
from quire import EngineArgs, SamplingParams
from quire.common.arguments.options import FlexibleArgumentParser
from quire.common.arguments.vllm_arguments import spelt_out, whole_number

FOLDER = Path(quire.__file__).parent / "interfaces" / "compat"
MODULES = sorted(
    str(path.relative_to(FOLDER).with_suffix("")).removesuffix("__init__").strip("/").replace("/", ".")
    for path in FOLDER.rglob("*.py")
)


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_a_module_has_vllms_name_and_quires_objects(name: str) -> None:
    theirs, ours = importlib.import_module(f"quire.{name}"), importlib.import_module(f"quire.interfaces.compat.{name}")
    for each in getattr(ours, "__all__", ()):
        assert not isinstance(getattr(ours, each), type) or getattr(theirs, each) is getattr(ours, each)
        defined = getattr(getattr(ours, each), "__module__", "")
        assert defined.startswith("quire.") or each in ("__version__", "PromptType") or "LogitsProcessor" in each


def test_no_module_hides_one_of_quire() -> None:
    for path in FOLDER.iterdir():
        beside = Path(quire.__file__).parent / path.name
        assert not beside.exists() or path.name in ("__init__.py", "engine", "__pycache__")
    assert {path.name for path in (FOLDER / "engine").glob("*.py")} == {"__init__.py", "async_llm_engine.py"}


def test_what_programs_import() -> None:
    from quire.config import PoolerConfig, VllmConfig
    from quire.config.args import EngineConfig
    from quire.interfaces.compat.engine.async_llm_engine import AsyncLLMEngine
    from quire.interfaces.compat.inputs import TextPrompt, TokensPrompt
    from quire.interfaces.compat.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

    assert quire.AsyncLLMEngine is AsyncLLMEngine is quire.AsyncLLM
    assert VllmConfig is EngineConfig
    assert PoolerConfig(pooling_type="CLS").mode == "first"
    assert TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}
    assert TextPrompt(prompt="a") == {"prompt": "a"}
    assert {Counter, Gauge, Histogram, Vector} == set(Metric.__subclasses__())
    assert importlib.import_module("quire.logger").init_logger("a") is logging.getLogger("a")
    random_uuid = importlib.import_module("quire.utils").random_uuid
    assert random_uuid() != random_uuid()
    importlib.import_module("quire.distributed").cleanup_dist_env_and_memory()
    with pytest.raises(ModuleNotFoundError, match=r"quire\.no_such_module"):
        importlib.import_module("quire.no_such_module")
    with pytest.raises(AttributeError, match=r"quire.config.*NoSuchConfig"):
        importlib.import_module("quire.config").NoSuchConfig  # noqa: B018


def parse(*arguments: str) -> dict[str, object]:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="quire-tiny")
    parser.add_argument("--my_option", type=int)
    return vars(parser.parse_args(arguments))


def test_a_program_parses_the_engines_options_and_its_own() -> None:
    options = parse("--max_model_len=64", "--max-num-seqs", "3", "--my_option", "5", "--no-enable-prefix-caching")
    assert options.pop("my_option") == 5
    args = EngineArgs(**options)
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("quire-tiny", 64, 3)
    assert not args.enable_prefix_caching
    assert (args.block_size, args.dtype) == (16, "auto")


def test_options_of_vllm_are_attributes_if_they_are_given() -> None:
    options = parse("--enforce-eager", "--trust_remote_code", "--load-format", "auto", "--compilation-config={}")
    assert (options["enforce_eager"], options["trust_remote_code"], options["load_format"]) == (True, True, "auto")
    assert options["compilation_config"] == {}
    assert "fully_sharded_loras" not in options
    options.pop("my_option")
    assert EngineArgs(**options) == EngineArgs(model="quire-tiny")


def test_options_are_spelt_as_vllm_spells_them() -> None:
    options = parse(
        *("-tp", "2", "-O3", "-q=int8", "--max-model-len", "1K", "--max-num-seqs", "2k", "-cc.mode", "3"),
        *("--speculative_config.method", "ngram", "-sc.num_speculative_tokens=4", "--hf-overrides.rope.kind+", "a,b"),
    )
    assert (options["optimization_level"], options["compilation_config"]) == (3, {"mode": 3})
    args = EngineArgs(**{name: value for name, value in options.items() if name != "my_option"})
    assert (args.tensor_parallel_size, args.quantization, args.max_num_seqs) == (2, "int8", 2000)
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
    assert args.hf_overrides == {"rope": {"kind": ["a", "b"]}}
    assert args.resolve().model.max_model_len == 1024


def test_none_is_written_as_help_and_vllm_write_it() -> None:
    options = parse("--quantization", "none", "--num-threads", "None", "--memory-limit", "none", "--hf-overrides=None")
    options.pop("my_option")
    assert EngineArgs(**options | {"generation_config": "none"}) == EngineArgs(
        model="quire-tiny", generation_config="none"
    )
    with pytest.raises(quire.ConfigError, match="seed='none': must be int"):
        EngineArgs(seed="none").resolve()


def test_what_a_program_and_a_separator_keep_for_themselves() -> None:
    known = {"-n", "--model", "--hf-overrides"}
    as_it_is = ["-n", "2", "--model=./a.b", "--seen.by", "others", "-1.5", "--", "-tp", "2", "-sc.method", "ngram"]
    assert spelt_out(as_it_is, known) == as_it_is
    assert spelt_out(["--hf-overrides.a", "1", "--hf-overrides.a.b", "2", "--", "-tp"], known) == [
        '--hf-overrides={"a": {"b": 2}}',
        "--",
        "-tp",
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("0.5G", 2**29), ("-1", -1), ("1.0001k", None)]
    + [(text, None) for text in ("", "k", "1e3", "1kb", "nan", "9" * 5000)],
)
def test_numbers_may_have_units(text: str, number: int | None) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("length", ["auto", -1, None])
def test_the_length_may_be_what_fits(length: str | int | None) -> None:
    assert EngineArgs(max_model_len=length).fits_model_len
    assert EngineArgs(max_model_len=length).resolve().model.max_model_len == 2048


def test_options_become_arguments_without_those_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--port", type=int)
    given = parser.parse_args(["--port", "80", "--seed", "4", "--enable-mixed-moe-lora-format"])
    given.enable_mixed_moe_lora_format = False
    assert EngineArgs.from_cli_args(given) == EngineArgs(seed=4)
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-such-option"])
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err


def test_parameters_for_logits_processors_are_a_dict() -> None:
    assert SamplingParams(extra_args={"a": 1}).extra_args == {"a": 1}
    with pytest.raises(quire.InvalidParamsError, match=r"extra_args=\[1\]: must be a dict"):
        SamplingParams(extra_args=[1])  # type: ignore[arg-type]
