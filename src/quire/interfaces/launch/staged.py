"""StagedLink: an engine whose stages are engine processes on several nodes, each behind a link of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.common import log
from quire.config.args import EngineArgs
from quire.engine.process import messages
from quire.interfaces.launch.link import EngineLink

_FROM_STAGE: msgspec.msgpack.Decoder[messages.ToClient] = msgspec.msgpack.Decoder(messages.ToClient)


class StagedLink:
    """The link to machine 0 of an engine, and those to the other machines. If one ends, all end."""

    def __init__(self, engine: EngineLink, stages: Sequence[EngineLink], args: EngineArgs, address: str) -> None:
        """Let the stages join the engine's process, which awaits them at the address once it gets its arguments.

        `args` are the arguments of all of them.
        """
        self.reader, self.pid, self.clock_s = engine.reader, engine.pid, engine.clock_s
        self.write, self.drain = engine.write, engine.drain
        self.close = engine.close
        """The stages end with the engine's process."""
        self.own_args: Mapping[str, Any] = {"nnodes": 1 + len(stages), "master_addr": address}
        self._engine, self._stages = engine, stages
        given = dataclasses.asdict(args) | self.own_args
        for number, stage in enumerate(stages, start=1):
            start = messages.Start(given | {"node_rank": number}, log.chosen_format, is_other_machine=True)
            stage.write(messages.to_frame(start))
        self._watching = [asyncio.create_task(self._watch(stage)) for stage in stages]

    async def _watch(self, stage: EngineLink) -> str:
        """Wait for the end of a stage, and end the engine then. Returns why the stage could not run, if it said so."""
        failure = ""
        try:
            while True:
                num_bytes = messages.frame_len(await stage.reader.readexactly(messages.LENGTH_BYTES))
                message = _FROM_STAGE.decode(await stage.reader.readexactly(num_bytes))
                if isinstance(message, messages.StartFailed):
                    failure = message.message
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            return failure
        finally:
            self._engine.close()

    def kill(self) -> None:
        """Kill all machines of the engine."""
        for link in (self._engine, *self._stages):
            link.kill()

    async def end(self) -> str:
        """End all machines of the engine, and return a description of how each ended."""
        ended, *others = await asyncio.gather(self._engine.end(), *[stage.end() for stage in self._stages])
        failures = await asyncio.gather(*self._watching)
        reasons = [failure or its for failure, its in zip(failures, others, strict=True)]
        return "; ".join([ended, *[f"stage {number}: {reason}" for number, reason in enumerate(reasons)]])
