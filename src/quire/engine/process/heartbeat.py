"""How the engine process shows that it is alive: once a second, from a thread of its own, it tells how far it is.

What counts is progress, not time: turns of the step loop and kernel calls, so that a step of thousands of tokens may
take as long as it does. Where one kernel alone takes seconds, the processor time it uses counts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.common import liveness
from quire.engine.process.messages import Heartbeat, to_frame

HEARTBEAT_S = 1.0
_MIN_CPU_S = 0.02
"""of a heartbeat's time: a kernel that has used less waits for something, on the busiest machine too"""


@dataclass(slots=True)
class Pulse:
    """What the step loop says of itself."""

    is_busy: bool = False
    """it does not wait for messages"""
    num_turns: int = 0


def beat(send: Callable[[bytes], object], pulse: Pulse, wait: Callable[[float], object] = time.sleep) -> None:
    """Send heartbeats until `send` or `wait` raises."""
    num_long, cpu_s = 0, 0.0
    while True:
        num_events, before_s, cpu_s = liveness.num_kernel_events, cpu_s, time.process_time()
        num_long += num_events % 2 and cpu_s - before_s > _MIN_CPU_S
        send(to_frame(Heartbeat(pulse.num_turns + num_events + num_long, pulse.is_busy)))
        wait(HEARTBEAT_S)
