"""Files that appear whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacement(path: Path) -> Iterator[BinaryIO]:
    """A new file, which takes the place of the file `path` and its permissions if the block ends without an error.

    `path` is no symbolic link: that itself would be replaced. Raises OSError if the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with partial.open("xb") as file:
        try:
            keep_permissions(path, file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def keep_permissions(path: Path, file: BinaryIO) -> None:
    """Give a file that is to replace `path` the permissions of that, if it exists."""
    if path.exists():
        os.fchmod(file.fileno(), path.stat().st_mode)
