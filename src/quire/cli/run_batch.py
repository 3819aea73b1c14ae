"""Run a batch file in OpenAI's format through the server's endpoints, without starting a server.

Each line of the input is an object with `custom_id`, `method`, `url` and `body`. Each line of the output, in the same
order, has the `custom_id` and the `response` or an `error`. The output file is created when all lines are done; until
then the results are in OUTPUT.partial, and --resume continues an interrupted run from there. The exit status is 1 if
some lines failed. Lines that are appended to the input after the run began are not processed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.arguments.options import add_engine_arguments, engine_kwargs
from quire.common.errors import ConfigError

if TYPE_CHECKING:
    from quire.interfaces.async_llm.async_llm import AsyncLLM
    from quire.server.api.batch_file import BatchRun
    from quire.server.config import ServerArgs

_EXIT_SOME_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", type=Path, help="requests, one per line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", type=Path, help="responses, one per line")
    parser.add_argument("--resume", action="store_true", help="continue a run that was interrupted")
    parser.add_argument(
        "--max-in-flight", type=int, metavar="N", help="lines that run at once (default: twice --max-num-seqs)"
    )
    parser.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="names that lines may use for the model"
    )
    parser.add_argument("--tool-parser", default="auto", metavar="FORMAT", help="format of the model's tool calls")
    parser.add_argument("--reasoning-parser", default="auto", metavar="FORMAT", help="format of the model's reasoning")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Check the files, load the model and run the lines; the exit status is 1 if some lines failed."""
    source, output = options.input_file, options.output_file
    if not source.is_file():
        raise ConfigError(f"the input file {str(source)!r} does not exist or is not a file")
    if output.exists() and (not output.is_file() or output.samefile(source)):
        raise ConfigError(f"the output file {str(output)!r} must be a file other than the input")
    if options.max_in_flight is not None and options.max_in_flight < 1:
        raise ConfigError(f"max_in_flight={options.max_in_flight}: must be 1 or more")
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    from quire.common.progress import progress
    from quire.config.args import EngineArgs
    from quire.interfaces.async_llm.async_llm import AsyncLLM
    from quire.server.api.batch_file import PartialFile
    from quire.server.config import ServerArgs

    args = ServerArgs(
        served_model_name=tuple(options.served_model_name),
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
    )
    source: Path = options.input_file
    partial = PartialFile(options.output_file, source, args.max_body, resume=options.resume)
    num_lines = partial.num_lines
    try:
        llm = await AsyncLLM.from_args(EngineArgs(**engine_kwargs(options)), holds=True)
        try:
            with progress("Lines", num_lines, "line", initial=partial.num_done, at_once=True) as advance:
                await _batch_run(llm, args, options).run(source, partial, advance)
        finally:
            await llm.shutdown()
        partial.finish()
    except BaseException:
        print(f"quire: {partial.num_done} of {num_lines} lines are done and saved in {partial.path}", file=sys.stderr)
        raise
    finally:
        partial.close()
    if source.exists() and source.stat().st_size > partial.num_bytes:
        print(f"quire: what was appended to {source} after the run began was not processed", file=sys.stderr)
    if partial.num_failed:
        print(
            f"quire: {num_lines} lines are done, of which {partial.num_failed} failed: see 'error', or 'response' "
            f"with a status_code of 400 or more, in {options.output_file}",
            file=sys.stderr,
        )
    return _EXIT_SOME_FAILED if partial.num_failed else 0


def _batch_run(llm: AsyncLLM, args: ServerArgs, options: argparse.Namespace) -> BatchRun:
    """Return a run over the server's application, with all endpoints that generate."""
    from quire.config.checkpoint.location import EMBEDDED_CHECKPOINTS
    from quire.server.api.batch_file import BatchRun
    from quire.server.app import ROUTES, make_app
    from quire.server.http.state import ServerState
    from quire.server.models.pool import ModelPool

    names = args.served_model_name or (engine_kwargs(options).get("model") or EMBEDDED_CHECKPOINTS[0],)
    state = ServerState(models=ModelPool.of(llm, names, args), args=args)
    return BatchRun(
        app=make_app(state),
        paths={row.path for row in ROUTES if row.generates and row.method == "POST"},
        is_running=lambda: not llm.is_lost,
        max_in_flight=options.max_in_flight or 2 * llm.config.scheduler.max_num_seqs,
        max_body_bytes=args.max_body,
    )
