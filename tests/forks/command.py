"""What a script named `quire` runs where a test lets a user's commands be forked: see `tests.forks.command`.

It asks the fork server for `python -m quire` with its own arguments, environment, folder and descriptors, passes
signals on, and ends as the fork does. It imports little, so that it takes hundredths of a second.
"""

import os
import signal
import sys

from wire import Request, receive_number, send  # beside this file: the script has only this folder on its path


def main(path: str, arguments: list[str]) -> None:
    """Ask the fork server at `path`. Signals that come before the fork has a number are passed on then."""
    pid, pending = 0, list[int]()

    def pass_on(number: int, _: object) -> None:
        if pid:
            os.kill(pid, number)
        else:
            pending.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    request = Request("quire", arguments, dict(os.environ), os.getcwd(), [0, 1, 2], False)
    connection = send(path, request, [0, 1, 2])
    pid = receive_number(connection)
    for number in pending:
        os.kill(pid, number)
    status = os.waitstatus_to_exitcode(receive_number(connection))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
