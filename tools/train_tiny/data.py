"""Write the training data: the standard library's source, and pairs of (name, first paragraph of its docstring).

Usage: `data.py OUT.json`. The data covers only the standard library of the Python that runs the program.
"""

import argparse
import importlib
import inspect
import json
import os
import sys
import sysconfig
import warnings
from collections import Counter
from pathlib import Path
from types import ModuleType

SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo", "ensurepip", "tkinter"),
    *("pydoc_data", "encodings"),
}
SKIPPED_MODULES = {"antigravity", "this", "idlelib", "lib2to3", "test", "turtledemo", "tkinter", "turtle"}
SUBMODULES = (
    *("asyncio.queues", "collections.abc", "concurrent.futures", "email.message", "http.client", "http.server"),
    *("importlib.metadata", "logging.handlers", "multiprocessing.pool", "os.path", "unittest.mock", "urllib.parse"),
    *("urllib.request", "xml.etree.ElementTree"),
)
# modules in C whose objects are exported by modules in Python
C_HOMES = {"builtins", "posix", "_io", "itertools", "math", "_collections", "_functools", "_operator"}
MIN_SOURCE_CHARS = 200
MIN_SUMMARY_CHARS, MAX_SUMMARY_CHARS = 20, 240
MAX_NAMES_PER_SUMMARY = 3


def library_source(root: Path) -> list[str]:
    """The text of every module below `root`, without tests, codec tables and packages installed beside the library."""
    texts = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(d for d in subfolders if d not in SKIPPED_FOLDERS and not d.startswith("config-"))
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a source in another encoding
                continue
            if len(text) > MIN_SOURCE_CHARS:
                texts.append(text)
    return texts


def summary(obj: object) -> str | None:
    """The first paragraph of a docstring (the second where the first is only a signature), if of useful length."""
    doc = inspect.getdoc(obj)
    if not isinstance(doc, str) or not doc.strip():
        return None
    paragraphs = [" ".join(paragraph.split()) for paragraph in doc.strip().split("\n\n")]
    text = paragraphs[0]
    if len(paragraphs) > 1 and (len(text) < 12 or ("->" in text and len(text) < 80)):
        text = paragraphs[1]
    if text.startswith("<") or "Help on" in text:
        return None
    return text if MIN_SUMMARY_CHARS <= len(text) <= MAX_SUMMARY_CHARS else None


def module_summaries(module: ModuleType, name: str) -> dict[str, str]:
    """Qualified name -> summary: a module, its own public functions and classes, and the classes' public members."""
    root = name.split(".")[0]
    objects: dict[str, object] = {name: module}
    for public in (public for public in dir(module) if not public.startswith("_")):
        obj = getattr(module, public, None)
        if not (inspect.isclass(obj) or inspect.isroutine(obj)):
            continue
        home = getattr(obj, "__module__", None)
        if isinstance(home, str) and home.split(".")[0] not in {root, f"_{root}"} | C_HOMES:
            continue
        full = public if name == "builtins" else f"{name}.{public}"
        objects[full] = obj
        if inspect.isclass(obj):
            members = sorted(member for member in vars(obj) if not member.startswith("_"))
            objects |= {f"{full}.{member}": getattr(obj, member, None) for member in members}
    return {full: text for full, obj in objects.items() if (text := summary(obj))}


def library_summaries() -> dict[str, str]:
    """Qualified name -> summary over the whole library; boilerplate that many names share is left out."""
    summaries: dict[str, str] = {}
    modules = sorted(m for m in sys.stdlib_module_names if not m.startswith("_") and m not in SKIPPED_MODULES)
    for name in (*modules, *SUBMODULES):
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # a module of another platform
            print(f"skipped {name}: {error}")
            continue
        summaries = module_summaries(module, name) | summaries
    num_names = Counter(summaries.values())
    return {name: text for name, text in summaries.items() if num_names[text] <= MAX_NAMES_PER_SUMMARY}


def main() -> None:
    """Write the file given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    warnings.simplefilter("ignore", DeprecationWarning)  # some of the library's modules warn when imported
    source = library_source(Path(sysconfig.get_path("stdlib")))
    summaries = library_summaries()
    out.write_text(json.dumps({"source": source, "summaries": summaries}), encoding="utf-8")
    print(f"{len(source)} files, {len(summaries)} docstrings -> {out}")


if __name__ == "__main__":
    main()
