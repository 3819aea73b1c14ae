"""The command line: what is printed where, with which exit status."""

import atexit
import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import CheckpointError, EngineArgs, __version__
from quire.cli import main
from quire.cli.bench import throughput
from quire.common.batch import Batch, StepResult
from quire.config.model import ModelConfig
from quire.interfaces.engine_owner import EngineOwner
from quire.kernels import isa

from ..scripted_engine import RecitingExecutor, recital
from .command import Run


def test_version_loads_nothing_heavy() -> None:
    """So it comes at once: what takes its time is importing torch, numpy and the like."""
    code = "import sys; from quire.cli import main; print(main(['--version']), *sorted(sys.modules))"
    code = f"try:\n    {code}\nexcept SystemExit as end:\n    print(end.code, *sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, modules = result.stdout.splitlines()
    assert version == f"quire {__version__}"
    assert modules.split()[0] == "0"
    assert not {"torch", "numpy", "transformers", "tokenizers", "msgspec", "jinja2"} & set(modules.split())


@pytest.mark.parametrize("command", ["generate", "chat", "plan", "bench", "demo"])
def test_every_command_explains_itself(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert f"usage: quire {command}" in out
    assert command in run("--help")[1]


def test_without_a_command_the_commands_are_asked_for(run: Run) -> None:
    status, _, err = run()
    assert status == 2
    assert "COMMAND" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generat"], "quire: unknown command 'generat', did you mean 'generate'? (allowed: generate, chat, embed, "),
        (["xyz"], "quire: unknown command 'xyz' (allowed: generate, chat, embed, serve, "),
        (["--versoin"], "quire: unknown option '--versoin', did you mean '--version'?"),
        (["--debug", "--versoin"], "quire: unknown option '--versoin', did you mean '--version'?"),
        (["--modle=x", "srve"], "quire: unknown option '--modle'"),
        (["--debug"], "quire: the following arguments are required: COMMAND"),
        (["chat", "--temprature", "1"], "quire: unknown option '--temprature', did you mean '--temperature'?"),
        (
            ["bench", "latency", "--input-length=5"],
            "quire: unknown option '--input-length', did you mean '--input-len'?",
        ),
        (["chat", "a", "b"], "quire: unknown argument 'b' (`quire chat"),
        (["generate", "a b"], "quire: unknown argument 'a b': a prompt comes after --prompt, a model after --model (`"),
        (["chat", "--target-step-ms", "x"], "quire chat: argument --target-step-ms: invalid float value: 'x'"),
        (["chat", "--seed", "1.5"], "quire chat: argument --seed: '1.5' is not a whole number, as in 16384, 16k (16,"),
        (["chat", "--max-tokens", "many"], "quire chat: argument --max-tokens: invalid int value: 'many'"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(run: Run, arguments: list[str], said: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(said)
    command = f" {arguments[0]}" if arguments[0] in ("chat", "bench", "generate") else ""
    assert f"(`quire{command}" in err


@pytest.mark.parametrize("arguments", [["--debug", "plan", "/nowhere"], ["plan", "--debug", "/nowhere"]])
def test_the_traceback_is_shown_wherever_it_is_asked_for(arguments: list[str]) -> None:
    with pytest.raises(CheckpointError, match="/nowhere"):
        main(arguments)


def test_a_plan_says_which_arguments_have_no_effect(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        status, out, _ = run("plan", "-O3", "--max-model-len", "-1")
    assert status == 0
    assert "context     2048 tokens" in out
    assert "optimization_level (nothing is compiled or recorded ahead of the first request)" in caplog.text


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--seed", str(2**63)), "seed=9223372036854775808: must be a 64-bit integer"),
        (("--max-num-batched-tokens", str(2**40)), "max_num_batched_tokens=1099511627776: must be"),
        (("--hf-overrides", "[" * 100_000), "is not JSON"),
        (("--speculative-config", "ngram"), """'ngram' is not JSON, as in '{"name": "value"}': Expecting value"""),
        (("--hf-overrides" + ".a" * 5000, "x"), ".a.a.a: 5,000 fields within one another; at most 16"),
        (("--hf-overrides.vocab_size", "[" * 100_000), "'vocab_size' is '[[[["),
        (("--device", "[" * 100_000), "device='[[["),
    ],
)
def test_what_is_beyond_all_measure_is_refused_in_one_line(run: Run, option: tuple[str, str], said: str) -> None:
    status, out, err = run("plan", *option)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize(
    ("option", "said"), [(("--temperature", "-1"), "temperature=-1.0"), (("--top-p", "2"), "top_p=2.0")]
)
def test_wrong_sampling_options_are_refused_before_the_model_is_loaded(
    run: Run, loaded: dict[str, Any], command: str, option: tuple[str, str], said: str
) -> None:
    status, _, err = run(command, *option)
    assert status == 2
    assert said in err
    assert not loaded


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["chat"], ["demo"], ["bench", "throughput"]])
@pytest.mark.parametrize("option", ["--data-parallel-size 2", "--distributed-executor-backend ray"])
def test_several_engines_are_refused_before_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], option: str
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(EngineOwner, "__init__", lambda *args, **kwargs: made.append(kwargs))
    monkeypatch.setattr(EngineOwner, "from_engine_args", made.append)
    assert main([*command, *option.split()]) == 2
    assert made == []
    error = f"quire: {option}: `quire {command[0]}` runs one engine, in its own process: leave the option out, or use "
    assert capsys.readouterr().err == error + "`quire serve`, `quire run-batch` or LLM in Python\n"


def test_options_may_have_underscores(run: Run, loaded: dict[str, Any]) -> None:
    assert run("generate", "--prompt", "a_b", "--max_model_len=128")[0] == 0
    assert loaded["kwargs"] == {"max_model_len": 128}


def test_chat_takes_the_model_as_serve_does(run: Run, loaded: dict[str, Any]) -> None:
    assert run("chat", "quire-draft")[0] == 0
    assert loaded["kwargs"] == {"model": "quire-draft"}
    loaded.clear()
    for command in ("chat", "plan"):
        status, _, err = run(command, "quire-draft", "--model", "quire-tiny")
        assert status == 2
        assert "two models are given, 'quire-draft' and 'quire-tiny'" in err


def test_the_chat_lists_its_commands(run: Run, loaded: dict[str, Any]) -> None:
    out = run("chat", stdin="/help\n/rest\n/etc/passwd?\n")[1]
    assert out.count("/reset   clear the conversation") == 2
    assert "there is no /rest, did you mean '/reset'?" in out
    assert out.count("prompt tokens from the prefix cache]") == 1, "a path is a message"


def test_engine_options_are_the_fields_of_engine_args(run: Run, loaded: dict[str, Any]) -> None:
    _, out, _ = run("generate", "--help")
    for name in EngineArgs.__dataclass_fields__:
        assert re.search(rf"--(no-)?{name.replace('_', '-')}\b", out), name
    arguments = ["--max-num-seqs", "3", "--max-model-len", "128", "--no-enable-prefix-caching", "--dtype", "float32"]
    assert run("generate", "--prompt", "x", *arguments)[0] == 0
    assert loaded["kwargs"] == {
        "max_num_seqs": 3,
        "max_model_len": 128,
        "enable_prefix_caching": False,
        "dtype": "float32",
    }


def test_ctrl_c_ends_a_command_quietly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = RecitingExecutor.execute

    def interrupted(self: RecitingExecutor, batch: Batch) -> StepResult:
        signal.raise_signal(signal.SIGINT)
        return execute(self, batch)

    monkeypatch.setattr(RecitingExecutor, "execute", interrupted)
    status, out, err = run("generate", "--prompt", "x")
    assert (status, out, err) == (130, "", "")


def test_only_the_command_itself_ends_without_examining_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that calls `main` goes on."""
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(sys, "argv", ["quire", "models"])
    assert main(["models"]) == 0
    assert at_exit == []
    assert main() == 0
    assert at_exit == [gc.freeze]


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, "-m", "quire", "plan"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=300,
        env={**os.environ, "QUIRE_ISA": "reference"},
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("arguments", [["plan"], ["--version"], ["--help"], ["plan", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_an_error_of_one_line(arguments: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "quire", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=300, env=environment)
    assert result.returncode == 2
    assert result.stderr == b"quire: the output cannot be written: No space left on device\n"


def test_plan_reads_no_weights(tmp_path: Path, run: Run) -> None:
    from quire.config.model import ModelConfig

    source = ModelConfig.resolve(None).path
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    status, out, _ = run("plan", str(tmp_path), "--num-gpu-blocks-override", "8", "--max-model-len", "100")
    assert status == 0
    assert "8 blocks of 16" in out
    status, out, _ = run("plan", "--json", "--model", str(tmp_path), "--num-gpu-blocks-override", "8")
    plan = json.loads(out)
    assert (plan["num_blocks"], plan["block_size"], plan["max_model_len"]) == (8, 16, 128)
    assert run("plan", str(tmp_path / "config.json"))[0] == 2


def test_plan_shows_the_part_of_each_of_several_engines(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr("quire.engine.routing.replicas.cpu_quota", lambda: None)
    several = ["plan", "--memory-limit", "400MiB", "--data-parallel-size"]
    status, out, _ = run(*several, "2")
    assert status == 0
    assert "memory      200.00 MiB of 200.00 MiB free" in out
    assert "engines     2; this is the plan of each" in out
    plans = [json.loads(run(*several, number, "--json")[1]) for number in ("1", "2")]
    assert [(plan["data_parallel_size"], plan["machine_limit_bytes"]) for plan in plans] == [
        (1, 400 * 2**20), (2, 200 * 2**20),
    ]  # fmt: skip
    status, _, error = run(*several, "3")
    assert status == 2
    assert "need 3 CPUs, and 2 are available" in error
    assert "data_parallel_size=0: must be 1 to 1024" in run(*several, "0")[2]
    status, out, _ = run(*several, "3", "--distributed-executor-backend", "ray")
    assert (status, "engines" in out) == (0, False), "its CPUs are not this machine's"


def test_plan_refuses_weights_that_do_not_fit_the_config(run: Run) -> None:
    """As a server would, which reads the same headers before any weight."""
    status, out, error = run("plan", "--hf-overrides", '{"intermediate_size": 100}')
    assert (status, out) == (2, "")
    assert "weight(s) of a wrong shape: " in error
    assert "model.layers.0.mlp.up_proj.weight [768, 256] instead of [100, 256]" in error


def test_bench_ends_with_exactly_the_promised_keys(run: Run, loaded: dict[str, Any]) -> None:
    arguments = ["--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--dtype", "float32"]
    status, out, _ = run("bench", "throughput", "--model", "quire-tiny", *arguments)
    lines = out.splitlines()
    result = json.loads(lines[-1])
    assert status == 0
    assert list(result) == [
        "engine", "model", "dtype", "num_prompts", "input_len", "output_len", "elapsed_s", "output_tokens_per_s",
        "total_tokens_per_s", "load_s", "peak_rss_bytes", "drafted_tokens", "accepted_tokens",
        "mean_acceptance_length", "limit_s", "read_gb_per_s", "gflop_per_s",
        "fraction_of_limit",
    ]  # fmt: skip
    assert (result["engine"], result["model"], result["dtype"]) == ("quire", "quire-tiny", "float32")
    assert (result["num_prompts"], result["input_len"], result["output_len"]) == (3, 20, 5)
    assert result["total_tokens_per_s"] == pytest.approx(5 * result["output_tokens_per_s"], rel=0.01)
    assert result["peak_rss_bytes"] > 10_000_000
    if isa() == "reference":
        assert result["fraction_of_limit"] is None
    else:
        assert result["fraction_of_limit"] == pytest.approx(result["limit_s"] / result["elapsed_s"], rel=0.2, abs=0.001)
        assert lines.pop(2).startswith(f"limit of this machine: {result['limit_s']:.3f} s, at ")
    assert len(lines) == 1 + 2, "one row for each run, then the object"
    assert loaded["kwargs"]["enable_prefix_caching"] is False
    assert loaded["llm"].engine.stats().num_generated_tokens == 2 * 3 * 5
    assert (result["drafted_tokens"], result["mean_acceptance_length"]) == (0, None), "no run spares another its work"
    assert len(run("bench", "throughput", *arguments, "--json", "--runs", "3")[1].splitlines()) == 1
    config = json.dumps({"method": "suffix", "num_speculative_tokens": 4, "adaptive": False})
    found = []
    for runs in ("1", "2"):
        options = ["--output-len", "60", "--runs", runs, "--speculative-config", config]
        status, out, _ = run("bench", "throughput", "--model", "quire-tiny", *arguments, *options)
        result = json.loads(out.splitlines()[-1])
        found.append([result[name] for name in ("drafted_tokens", "accepted_tokens", "mean_acceptance_length")])
        assert f"drafts: {result['accepted_tokens']} of {result['drafted_tokens']} accepted, mean" in out
    assert found[0] == found[1], "the first run's outputs are not looked up"
    assert found[0][0] >= found[0][1] > 0
    assert 1 < found[0][2] <= 5


def test_bench_takes_weights_that_another_tool_quantized(run: Run, tmp_path: Path) -> None:
    """A checkpoint of that method, of which every module is left out."""
    folder = shutil.copytree(ModelConfig.resolve("quire-draft").path, tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "fp8"}}))
    arguments = ["--num-prompts", "1", "--input-len", "2", "--output-len", "2", "--json"]
    status, out, err = run("bench", "throughput", "--model", str(folder), *arguments)
    assert status == 0, err
    assert json.loads(out)["elapsed_s"] > 0


def test_bench_takes_the_same_prompts_every_time() -> None:
    prompts = throughput.random_prompts(4, 50, 100)
    assert prompts == throughput.random_prompts(4, 50, 100)
    assert prompts[0] != prompts[1]
    assert {len(prompt) for prompt in prompts} == {50}
    assert all(3 <= token_id < 100 for prompt in prompts for token_id in prompt)


def test_bench_refuses_what_it_cannot_measure(run: Run) -> None:
    status, _, err = run("bench", "throughput", "--input-len", "250", "--output-len", "50")
    assert status == 2
    assert "tokens instead of 50" in err
    assert run("bench", "throughput", "--num-prompts", "0")[0] == 2
    assert run("bench")[0] == 2


def test_demo_shows_texts_speed_and_reuse(run: Run, loaded: dict[str, Any]) -> None:
    status, out, _ = run("demo", "--max-model-len", "512")
    assert status == 0
    assert out.count("> What does ") - 2 == out.count("> Summarize ") > 3
    assert "os.urandom do? (with the adapter 'pirate')" in out
    assert recital(17) in out
    assert re.search(r"\d+ requests, \d+ prompt tokens and \d+ generated tokens in .* s: \d+ generated tokens/s", out)
    hits, queried = map(int, re.search(r"prefix cache: (\d+) of (\d+) prompt tokens reused", out).groups())
    assert 0 < hits < queried


def test_options_of_vllm_are_taken_where_they_make_no_difference(run: Run, loaded: dict[str, Any]) -> None:
    arguments = ["--enforce-eager", "quire-draft", "--load-format", "auto", "--no-enable-log-requests"]
    assert run("chat", *arguments, "--kv_offloading_size=0.5", "--speculative-config", "None")[0] == 0
    assert loaded["kwargs"] == {
        "enforce_eager": True, "model": "quire-draft", "load_format": "auto", "enable_log_requests": False,
        "kv_offloading_size": 0.5, "speculative_config": None,
    }  # fmt: skip
    assert EngineArgs(**loaded["kwargs"]) == EngineArgs(model="quire-draft", swap_space=0.5)


def test_options_of_vllm_that_ask_for_something_else_are_refused(run: Run) -> None:
    status, _, err = run("serve", "--data-parallel-rank", "2")
    assert (status, err) == (
        2,
        "quire: data_parallel_rank='2' is not supported: engines, ranks and stages are arranged by data_parallel_size, "
        "tensor_parallel_size, pipeline_parallel_size and nnodes alone: docs/scaling.md\n",
    )
    status, _, err = run("top", "--enforce-eager")
    assert status == 2
    assert "unknown option '--enforce-eager'" in err
