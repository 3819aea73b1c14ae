"""Run an example of docs/clients.md and then one of the programs beside this file, without the network.

.venv/clients-apart/bin/python tests/clients/apart/launch.py run_litellm.py URL KEY < EXAMPLE
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

LEFT_THE_MACHINE = 3


def refuse_the_network(event: str, arguments: tuple[Any, ...]) -> None:
    """End the process, as an audit hook, when it looks up another machine or connects to one."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if host not in ("127.0.0.1", "localhost"):
        os.write(2, f"it tried to reach {host}\n".encode())
        os._exit(LEFT_THE_MACHINE)  # an exception could be caught


sys.addaudithook(refuse_the_network)
exec(compile(sys.stdin.read(), "docs/clients.md", "exec"), {"__name__": "__main__"})
runpy.run_path(str(Path(__file__).with_name(sys.argv[1])), run_name="__main__")
