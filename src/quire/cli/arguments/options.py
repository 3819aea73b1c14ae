"""Options that several commands share, and their conversion to arguments of the engine."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.common.arguments.options import add_field_arguments
from quire.common.errors import ConfigError
from quire.common.memory import collection_paused
from quire.common.params import SamplingParams
from quire.config.args import EngineArgs

if TYPE_CHECKING:
    from quire.common.lora import KnownAdapter
    from quire.interfaces.llm import LLM

DEFAULT_MAX_TOKENS = 512

_SAMPLING: tuple[tuple[str, type, str, str], ...] = (
    ("temperature", float, "T", "0 takes the likeliest token; larger is more random (default: the checkpoint's, or 0)"),
    ("top_k", int, "K", "sample among the K likeliest tokens"),
    ("top_p", float, "P", "sample among the likeliest tokens whose probabilities add up to P"),
    ("min_p", float, "P", "sample among the tokens at least P times as likely as the likeliest"),
    ("presence_penalty", float, "X", "subtract X, -2 to 2, from the logit of every token that is in the output"),
    ("frequency_penalty", float, "X", "subtract X from a token's logit for each time it is in the output"),
    ("repetition_penalty", float, "X", "divide the logits of tokens in the prompt or output by X"),
    ("min_tokens", int, "N", "generate N tokens before a stop condition may end the output"),
    ("truncate_prompt_tokens", int, "N", "keep the last N tokens of a longer prompt; -1: the number that fits"),
)
_SAMPLES = (
    ("n", "number of outputs for each prompt"),
    ("best_of", "number of samples to generate, of which the n likeliest are returned"),
    ("logprobs", "return log-probabilities of each token and of the N likeliest tokens at its position"),
    ("prompt_logprobs", "return the same log-probabilities for the prompt's tokens"),
)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of EngineArgs, with the name, type, help and default of the field."""
    add_field_arguments(parser, EngineArgs, "engine")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model as an argument without a name."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")


def engine_kwargs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's arguments among the options given. Raises ConfigError for two models."""
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    given = {name: value for name, value in vars(options).items() if name in names}
    given |= getattr(options, "vllm_arguments", {})
    model = getattr(options, "positional_model", None)
    if model is not None and given.setdefault("model", model) != model:
        raise ConfigError(f"two models are given, {model!r} and {given['model']!r}: give one")
    return given


def load_llm(options: argparse.Namespace, *, one_engine: bool = True) -> LLM:
    """Load the model that the options name. Raises ConfigError if it would run in other processes and the command
    needs `one_engine` in this one."""
    args = EngineArgs(**engine_kwargs(options))
    if one_engine and args.has_own_processes:
        several = args.data_parallel_size > 1
        option = f"--data-parallel-size {args.data_parallel_size}" if several else "--distributed-executor-backend ray"
        raise ConfigError(
            f"{option}: `quire {options.command}` runs one engine, in its own process: leave the option out, or use "
            "`quire serve`, `quire run-batch` or LLM in Python"
        )
    with collection_paused():
        from quire.interfaces.llm import LLM  # imported late because it loads torch

    return LLM.from_engine_args(args)


def add_lora_argument(parser: argparse.ArgumentParser) -> None:
    """Add the adapter that a command uses."""
    text = "LoRA adapter to use: a folder as PEFT saves it, or a hub id; NAME= before it as in --lora-modules"
    parser.add_argument("--lora", metavar="[NAME=]FOLDER", help=text)


def load_llm_and_adapter(options: argparse.Namespace) -> tuple[LLM, KnownAdapter | None]:
    """Load the model that the options name, and the adapter of `--lora`, if there is one."""
    text = options.lora
    if text is None:
        return load_llm(options), None
    module = text if "=" in text and not Path(text).is_dir() else f"lora={text}"
    options.enable_lora, options.lora_modules = True, (*getattr(options, "lora_modules", ()), module)
    llm = load_llm(options)
    return llm, llm.engine.adapters.get(module.partition("=")[0])


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how tokens are sampled."""
    group = parser.add_argument_group("sampling")
    text = f"largest number of tokens to generate (default: {DEFAULT_MAX_TOKENS})"
    group.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help=text)
    for name, kind, metavar, text in _SAMPLING:
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the output before this text; may be given several times"
    )
    group.add_argument(
        "--bad-words", action="append", metavar="WORD", help="never complete this word; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for several outputs of a prompt and for log-probabilities."""
    group = parser.add_argument_group("samples and log-probabilities (with --json)")
    for name, text in _SAMPLES:
        flag = "-n" if name == "n" else "--" + name.replace("_", "-")
        group.add_argument(flag, type=int, metavar="N", help=text)


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters given. Raises InvalidParamsError for wrong ones, before a model is loaded."""
    names = [name for name, *_ in _SAMPLING] + [name for name, _ in _SAMPLES]
    found = {name: getattr(options, name, None) for name in ("stop", "bad_words", *names)}
    given = {name: value for name, value in found.items() if value is not None}
    given |= {"max_tokens": options.max_tokens, "ignore_eos": options.ignore_eos}
    SamplingParams(**given)
    return given


def sampling_params(given: dict[str, Any], llm: LLM) -> SamplingParams:
    """Return the checkpoint's recommended parameters with those given; greedy if it recommends nothing."""
    recommended = llm.default_sampling_params()
    config = llm.engine.model_config.generation_config
    greedy = {} if config.get("do_sample") or config.get("temperature") is not None else {"temperature": 0.0}
    return type(recommended)(**msgspec.structs.asdict(recommended) | greedy | given)
