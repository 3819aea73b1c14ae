"""Complete prompts, all of them in one batch.

If the checkpoint has a chat template, each prompt is sent as a user's message and the output is the answer; with --raw
the prompt is continued as plain text instead. Prompts come from --prompt or --prompts-file; with neither, standard
input is one prompt.

With one prompt, only the output is printed; with several, each output follows its prompt. With --json, each prompt
gives one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.arguments.options import (
    add_engine_arguments,
    add_lora_argument,
    add_sample_arguments,
    add_sampling_arguments,
    load_llm_and_adapter,
    sampling_options,
    sampling_params,
)
from quire.cli.terminal.text import without_controls
from quire.common.errors import InvalidParamsError, InvalidPromptError

if TYPE_CHECKING:
    from quire.common.outputs import CompletionOutput, Logprob, RequestOutput
    from quire.interfaces.llm import LLM

_EXIT_SOME_REJECTED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", nargs="+", action="extend", metavar="TEXT", help="one or more prompts")
    source.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="file with one prompt per line; in a .jsonl file each line is a JSON string, or an object with 'prompt', "
        "'prompt_token_ids' or 'messages'; - reads lines from standard input",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="use the chat template (the default if there is one)")
    form.add_argument("--raw", action="store_true", help="continue the prompts as plain text")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    add_lora_argument(parser)
    add_sampling_arguments(parser)
    add_sample_arguments(parser)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Read the prompts, load the model and print the outputs; the exit status is 1 if some prompts were rejected."""
    given = sampling_options(options)
    if not options.json and (given.get("n", 1) > 1 or given.keys() & {"logprobs", "prompt_logprobs"}):
        raise InvalidParamsError("-n, --logprobs and --prompt-logprobs have no effect without --json: add it")
    items = list(_read_prompts(options))
    if not items:
        raise InvalidPromptError("no prompt was given: use --prompt, --prompts-file or standard input")
    llm, lora = load_llm_and_adapter(options)
    chat = options.chat or (not options.raw and bool(llm.engine.tokenizer.chat_templates))
    prompts = [_to_prompt(llm, item, chat) for item in items]
    params = sampling_params(given, llm)
    is_batch = len(prompts) > 1
    outputs = llm.generate(prompts if is_batch else prompts[0], params, use_tqdm=is_batch, lora_request=lora)
    for i, (item, output) in enumerate(zip(items, outputs, strict=True)):
        if options.json:
            print(json.dumps(_to_dict(item, output), ensure_ascii=False))
        elif len(items) == 1:
            print(without_controls(output.outputs[0].text))
        else:
            text = output.outputs[0].text if output.error is None else f"(rejected: {output.error})"
            print(without_controls(f"{chr(10) if i else ''}> {_title(item)}\n{text}"))
    return _EXIT_SOME_REJECTED if any(output.error for output in outputs) else 0


def _read_prompts(options: argparse.Namespace) -> Iterator[Any]:
    """Yield prompts as `generate` takes them, or `{"messages": [...]}`."""
    if options.prompt is not None:
        yield from options.prompt
    elif options.prompts_file is not None:
        yield from _read_file(options.prompts_file)
    elif not sys.stdin.isatty() and (text := _read_stdin().removesuffix("\n")):
        yield text


def _read_stdin() -> str:
    return sys.stdin.read().removeprefix("\ufeff")  # a byte order mark is no part of a text


def _read_file(name: str) -> Iterator[Any]:
    try:
        text = _read_stdin() if name == "-" else Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPromptError(f"the prompts file {name!r} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line.strip():
            yield _parse_json(name, number, line) if name.endswith(".jsonl") else line


def _parse_json(name: str, number: int, line: str) -> Any:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidPromptError(f"{name}, line {number}: not JSON: {error}") from error
    if isinstance(item, str) or (isinstance(item, dict) and item.keys() & {"prompt", "prompt_token_ids", "messages"}):
        return item
    raise InvalidPromptError(
        f"{name}, line {number}: must be a string, or an object with 'prompt', 'prompt_token_ids' or 'messages'"
    )


def _to_prompt(llm: LLM, item: Any, chat: bool) -> Any:
    """Apply the chat template: to text only if `chat`, to messages always, to token ids never."""
    if isinstance(item, dict) and "messages" in item:
        return llm.chat_prompt(item["messages"])
    text = item.get("prompt") if isinstance(item, dict) else item
    if not chat or not isinstance(text, str) or (isinstance(item, dict) and "prompt_token_ids" in item):
        return item
    return llm.chat_prompt([{"role": "user", "content": text}])


def _title(item: Any) -> str:
    if isinstance(item, str):
        return item
    if "messages" in item:
        return str(item["messages"][-1].get("content"))
    return str(item.get("prompt") or item.get("prompt_token_ids"))


def _to_dict(item: Any, output: RequestOutput) -> dict[str, Any]:
    """Return one row of JSON: the prompt and the first output's fields, with all outputs in `outputs` if several."""
    given = item if isinstance(item, dict) else {"prompt": item}
    answers = [_answer(completion) for completion in output.outputs]
    row = {
        **{key: given[key] for key in ("prompt", "prompt_token_ids", "messages") if key in given},
        **answers[0],
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
    }
    if len(answers) > 1:
        row["outputs"] = answers
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [entries and _logprobs(entries) for entries in output.prompt_logprobs]
    return row


def _answer(completion: CompletionOutput) -> dict[str, Any]:
    row: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if (total := completion.cumulative_logprob) is not None:
        row["cumulative_logprob"] = total if math.isfinite(total) else None
    if completion.logprobs is not None:
        row["logprobs"] = [_logprobs(entries) for entries in completion.logprobs]
    return row


def _logprobs(entries: dict[int, Logprob]) -> list[dict[str, Any]]:
    """Return rows for JSON, the sampled token first. JSON has no infinity, so null stands for probability 0."""
    return [
        {
            "token_id": token_id,
            "logprob": entry.logprob if math.isfinite(entry.logprob) else None,
            "rank": entry.rank,
            "token": entry.decoded_token,
        }
        for token_id, entry in entries.items()
    ]
