"""Check the contents of a built wheel or source archive before it is published: `check_archive.py FILE...`."""

import argparse
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

MAX_BYTES = 40 * 2**20
CHECKPOINT_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
PACKAGE = (
    "quire/py.typed",
    "quire/common/version.py",
    "quire/kernels/backends/reference.py",
    "quire/server/page/files/index.html",
    "quire/server/page/files/app.js",
    "quire/server/page/files/styles/base.css",
    "quire/server/page/docs/index.html",
    "quire/common/arguments/vllm_arguments.toml",
    "quire/config/checkpoint/tested_variants.json",
    "quire/interfaces/compat/sampling_params.py",
    "quire/models/embedded/LICENSE-PSF.txt",
    *(f"quire/models/embedded/pirate/{file}" for file in ("adapter_config.json", "adapter_model.safetensors")),
    *(f"quire/models/embedded/{name}/{file}" for name in ("quire-tiny", "quire-draft") for file in CHECKPOINT_FILES),
)
WHEEL = (*PACKAGE, "quire/_native*", "quire-*.dist-info/METADATA", "quire-*.dist-info/licenses/LICENSE")
SDIST = (
    *(f"src/{name}" for name in PACKAGE),
    "CMakeLists.txt",
    "csrc/*.cpp",
    "tools/check_isa_symbols.sh",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
UNWANTED = ("*.pyc", "*/.venv/*", ".venv/*", "build/*", "*/.hypothesis/*", "*/pytorch_model.bin", "*.pkl")


def archive_names(path: Path) -> list[str]:
    """Return the names of an archive's files, without the top folder of a source archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.namelist()
    with tarfile.open(path) as sdist:
        return [name.partition("/")[2] for name in sdist.getnames()]


def problems(path: Path) -> list[str]:
    """Return descriptions of what is wrong with an archive."""
    names = archive_names(path)
    wanted = WHEEL if path.suffix == ".whl" else SDIST
    found = [f"lacks {pattern}" for pattern in wanted if not any(fnmatch(name, pattern) for name in names)]
    found += [f"contains {name}" for name in names if any(fnmatch(name, pattern) for pattern in UNWANTED)]
    if path.suffix == ".whl":
        found += [
            f"contains {name}, which is outside the package"
            for name in names
            if not fnmatch(name, "quire/*") and "dist-info" not in name
        ]
    if path.stat().st_size > MAX_BYTES:
        found.append(f"is {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    return found


def main() -> int:
    """Print one line per archive and per problem; the exit status is 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", nargs="+", type=Path)
    failed = False
    for path in parser.parse_args().archives:
        found = problems(path)
        failed |= bool(found)
        for problem in found:
            print(f"{path.name} {problem}")
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {len(archive_names(path))} files")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
