"""Heartbeats: once a second, a thread of the engine process reports the progress of the step loop.

Progress is counted in turns of the step loop and in kernel calls, so that a step of thousands of tokens may take any
time without seeming to hang. While a single kernel runs for seconds, the processor time that it uses is progress too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.common import liveness
from quire.engine.process.messages import Heartbeat, to_frame

HEARTBEAT_S = 1.0
_MIN_CPU_S = 0.02
"""Processor time between two heartbeats. A kernel that has used less is waiting for something, even on a busy machine.
"""


@dataclass(slots=True)
class Pulse:
    """The state of the step loop, which the loop writes and the heartbeats report."""

    is_busy: bool = False
    """Whether the loop has something to do; False while it waits for messages."""
    num_turns: int = 0
    """Number of turns of the loop so far."""


def beat(send: Callable[[bytes], object], pulse: Pulse, wait: Callable[[float], object] = time.sleep) -> None:
    """Send heartbeats until `send` or `wait` raises."""
    num_long, cpu_s = 0, 0.0
    while True:
        num_events, before_s, cpu_s = liveness.num_kernel_events, cpu_s, time.process_time()
        num_long += num_events % 2 and cpu_s - before_s > _MIN_CPU_S
        send(to_frame(Heartbeat(pulse.num_turns + num_events + num_long, pulse.is_busy)))
        wait(HEARTBEAT_S)
