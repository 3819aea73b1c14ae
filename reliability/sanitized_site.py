"""Redirects `quire._native` to a sanitized extension.

It is copied beside the extension as `sitecustomize.py`, so that every Python with that folder in PYTHONPATH uses it,
including the child processes of tests.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class RedirectingFinder:
    """A finder of modules, like that of an editable installation."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "quire._native":
            return None
        (extension,) = Path(__file__).parent.glob("_native.*.so")
        return importlib.util.spec_from_file_location(name, extension)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, RedirectingFinder())
