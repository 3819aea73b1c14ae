"""Run a batch of prompts on the embedded checkpoint, and print the outputs and the speed.

The checkpoint was trained on the docstrings of Python's standard library. The first batch has questions and pieces of
code; the second asks a further question in each conversation, whose beginning is then in the prefix cache. The last
asks one question with and without a LoRA adapter, which was trained to answer like a pirate.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from quire.cli.arguments.options import add_engine_arguments, engine_kwargs, load_llm
from quire.common.lora import LoRARequest
from quire.common.params import SamplingParams
from quire.config.checkpoint.location import EMBEDDED_CHECKPOINTS, EMBEDDED_ROOT

if TYPE_CHECKING:
    from quire.common.outputs import RequestOutput
    from quire.engine.requests.input_processor import Prompt
    from quire.interfaces.llm import LLM

_SUBJECTS = ("json.dumps", "textwrap.dedent", "shutil.copytree", "bisect.bisect_left", "heapq.merge", "os.replace")
_CODE = ("import unittest\n\nclass", "def __repr__(self):\n    return")
_ADAPTED_QUESTION = "What does os.urandom do?"
_CODE_TOKENS = 48
_ANSWER_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run two batches: questions and code, then a further question after each answer."""
    has_adapter = engine_kwargs(options).get("model") in (None, EMBEDDED_CHECKPOINTS[0])
    options.enable_lora = has_adapter or getattr(options, "enable_lora", False)
    llm = load_llm(options)
    answering = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS)
    coding = SamplingParams(temperature=0.0, max_tokens=_CODE_TOKENS)
    start = time.monotonic()
    chats = [[{"role": "user", "content": f"What does {subject} do?"}] for subject in _SUBJECTS]
    first = _generate(llm, chats, answering, _CODE, coding)
    for chat, output in zip(chats, first, strict=False):
        chat.append({"role": "assistant", "content": output.outputs[0].text})
    for chat, subject in zip(chats, _SUBJECTS, strict=True):
        chat.append({"role": "user", "content": f"Summarize {subject} as JSON."})
    second = _generate(llm, chats, answering, (), coding)
    third = _with_and_without_adapter(llm, answering) if has_adapter else []
    elapsed_s = time.monotonic() - start
    print(_summary(llm, len(first) + len(second) + len(third), elapsed_s))
    return 0


def _generate(
    llm: LLM, chats: list[Any], answering: SamplingParams, code: tuple[str, ...], coding: SamplingParams
) -> list[RequestOutput]:
    """Run chats and code in one batch and print the outputs."""
    prompts: list[Prompt] = [*map(llm.chat_prompt, chats), *code]
    outputs = llm.generate(prompts, [answering] * len(chats) + [coding] * len(code))
    for title, output in zip([*(chat[-1]["content"] for chat in chats), *code], outputs, strict=True):
        is_code = title in code
        print(f"{title}{output.outputs[0].text}\n" if is_code else f"> {title}\n{output.outputs[0].text}\n")
    return outputs


def _with_and_without_adapter(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """Ask the model, and the model with an adapter, in one batch and print the answers."""
    pirate = LoRARequest("pirate", 1, str(EMBEDDED_ROOT / "pirate"))
    question = [{"role": "user", "content": _ADAPTED_QUESTION}]
    outputs = llm.chat([question] * 2, params, lora_request=[None, pirate])
    for name, output in zip(("the model", "with the adapter 'pirate'"), outputs, strict=True):
        print(f"> {_ADAPTED_QUESTION} ({name})\n{output.outputs[0].text}\n")
    return outputs


def _summary(llm: LLM, num_requests: int, elapsed_s: float) -> str:
    stats = llm.engine.stats()
    return (
        f"{num_requests} requests, {stats.num_prompt_tokens} prompt tokens and {stats.num_generated_tokens} generated "
        f"tokens in {elapsed_s:.2f} s: {stats.num_generated_tokens / elapsed_s:.0f} generated tokens/s\n"
        f"prefix cache: {stats.num_prefix_hit_tokens} of {stats.num_prefix_queried_tokens} prompt tokens reused, "
        f"hit rate {stats.prefix_hit_rate:.0%}"
    )
