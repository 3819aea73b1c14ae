"""Run the tests of the kernels on emulated 64-bit Arm processors: `python -m tools.emulate_arm64 [--all] [ARGUMENTS]`.

The extension must lie in build/arm64 (`make arm64`). Debian's user-mode emulator runs Debian's Python for arm64, with
arm64 wheels of the packages that hold native code; the other packages and the tests are those of this environment.
First each of some processors must choose its variants; then the tests run on the one that has them all. With `--all`
every case runs; without, one in SHARE of the cases of the variants for arm64 that `make test` runs, with few examples.
ARGUMENTS go to pytest.

Where Debian's packages or the wheels cannot be fetched, the program prints a message and succeeds. It measures no
speed.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "arm64"
EMULATED = ROOT / "build" / "arm64-root"
PYTHON = f"python3.{sys.version_info.minor}"
# Packages of Debian, with what they depend on.
DEBIAN = (PYTHON, "libstdc++6", "libgomp1")
# The newest torch whose arm64 wheel is small and without CUDA: it computes only what the kernels are compared with.
TORCH = "torch==2.9.1"
NATIVE = ("numpy", "msgspec", "hypothesis", "markupsafe", "safetensors", "tokenizers")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
# What each processor of the emulator must choose; the first has everything.
PROCESSORS = {
    "max,pauth-impdef=on,sve-default-vector-length=32": ["sve256", "neon_i8mm", "neon_dot", "neon", "portable"],
    "max,pauth-impdef=on,sve-default-vector-length=64": ["neon_i8mm", "neon_dot", "neon", "portable"],
    "neoverse-n1": ["neon_dot", "neon", "portable"],
    "cortex-a72": ["neon", "portable"],
}
SHARE = 40
TESTS = "tests/kernels"
# Tests whose cases take half a minute each when emulated.
LONG = ("test_products_are_the_references_for_any_number_of_rows", "odd_row", "fit_its_scratch")
# Its tests start and fork processes, which fails under the emulator.
PROCESSES = "test_backend.py"


class UnavailableError(Exception):
    """Something that the emulation needs cannot be had here."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """As a plugin of the emulated pytest: one in `--share` cases runs."""
    parser.addoption("--share", type=int, default=1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose by a hash of the name, so that the choice never changes."""
    share = config.getoption("share")
    items[:] = [
        item for item in items if PROCESSES not in item.nodeid and (share == 1 or is_in_share(item.nodeid, share))
    ]


def is_in_share(name: str, share: int) -> bool:
    """Whether a case is one of the chosen one in `share`. Those of LONG tests and of portable kernels never are."""
    return zlib.crc32(name.encode()) % share == 0 and not any(part in name for part in (*LONG, "portable"))


def main(arguments: list[str]) -> int:
    """Prepare what is missing, and run the tests; the exit status is that of pytest."""
    try:
        emulator = find_emulator()
        prepare(EMULATED)
        extension = find_extension()
    except (UnavailableError, subprocess.TimeoutExpired) as error:
        print(f"skipped: {error}")
        return 0
    link_package(extension)
    for processor, expected in PROCESSORS.items():
        code = "from quire import _native; print(*_native.available_isas())"
        done = subprocess.run(
            [*emulated(emulator, processor), "-c", code], env=environment(), capture_output=True, text=True
        )
        found = done.stdout.split()
        if found != expected:
            print(f"{processor} should have the variants {expected}, and has {found}\n{done.stderr}")
            return 1
    command = [*emulated(emulator, next(iter(PROCESSORS))), "-m", "pytest", *emulator_arguments(arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment()).returncode


def emulator_arguments(arguments: list[str]) -> list[str]:
    """What the emulated pytest is started with. The name of this must not begin as those of its hooks do."""
    rest = [argument for argument in arguments if argument != "--all"]
    share = 1 if rest != arguments else SHARE
    chosen = ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "tools.emulate_arm64", f"--share={share}"]
    if share != 1:
        chosen += ["-o", f"testpaths={TESTS}", "--hypothesis-profile=least"]
    elif not any(argument.startswith("tests") for argument in rest):
        chosen += [TESTS]  # of tests that are not named, most cases are left out (tests/effort.py)
    return [*chosen, *rest]


def find_emulator() -> str:
    """The emulator's path; root installs it if it is missing."""
    names = ("qemu-aarch64", "qemu-aarch64-static")
    install = "apt-get update && apt-get install --yes --no-install-recommends qemu-user"
    if not any(map(shutil.which, names)) and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["sh", "-c", install], capture_output=True, timeout=300)
    for name in names:
        if path := shutil.which(name):
            return path
    raise UnavailableError("qemu-aarch64 (Debian's qemu-user) is missing and could not be installed")


def find_extension() -> Path:
    """The extension for arm64."""
    found = sorted(BUILD.glob("_native*.so"))
    if not found:
        raise UnavailableError(f"there is no extension in {BUILD}: run `make arm64`")
    return found[-1]


def prepare(folder: Path) -> None:
    """Unless `folder` has them, put into it `root`, a Debian of few packages, and `site`, native packages of Python."""
    packages = [TORCH, *(f"{name}=={version(name)}" for name in NATIVE)]
    wanted, stamp = "\n".join([*DEBIAN, *packages]), folder / "contents"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    fetch_debian(folder)
    fetch_wheels(folder, packages)
    stamp.write_text(wanted)


def fetch_debian(folder: Path) -> None:
    """Unpack Debian's packages, by lists and caches of their own, so that nothing of this system changes."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnavailableError("this system has no apt-get and dpkg-deb, which fetch Debian's arm64 packages")
    state, cache = folder / "apt" / "state", folder / "apt" / "cache"
    for part in (state / "lists" / "partial", cache / "archives" / "partial"):
        part.mkdir(parents=True)
    (state / "status").touch()
    config = folder / "apt" / "apt.conf"
    config.write_text(
        f'APT::Architecture "arm64";\nAPT::Architectures "arm64";\nAPT::Sandbox::User "";\n'
        f'Dir::State "{state}";\nDir::State::status "{state}/status";\nDir::Cache "{cache}";\n'
    )
    install = ["install", "--yes", "--download-only", "--no-install-recommends", *DEBIAN]
    for command in (["update"], install):
        done = subprocess.run(
            ["apt-get", "-qq", *command],
            env={**os.environ, "APT_CONFIG": str(config)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
        if done.returncode != 0:
            raise UnavailableError(f"apt-get {command[0]} of Debian's arm64 packages failed: {done.stderr.strip()}")
    for package in sorted((cache / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, folder / "root"], check=True)
    shutil.rmtree(folder / "apt")


def fetch_wheels(folder: Path, packages: list[str]) -> None:
    """Unpack wheels for arm64, without what they depend on."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary=:all:", f"--python-version=3.{sys.version_info.minor}"]
    pip += [f"--platform={platform}" for platform in PLATFORMS]
    done = subprocess.run([*pip, f"--dest={folder}/wheels", *packages], capture_output=True, text=True)
    if done.returncode != 0:
        raise UnavailableError(f"pip cannot download the wheels for arm64: {done.stderr.strip()}")
    for wheel in sorted((folder / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    shutil.rmtree(folder / "wheels")


def link_package(extension: Path) -> None:
    """Put a package `quire` in front whose files are links to the sources, and to the extension for arm64."""
    package = EMULATED / "package" / "quire"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for source in (ROOT / "src" / "quire").iterdir():
        if not source.name.startswith(("_native", "__pycache__")):
            (package / source.name).symlink_to(source)
    suffix = f".cpython-3{sys.version_info.minor}-aarch64-linux-gnu.so"
    (package / f"_native{suffix}").symlink_to(extension)


def emulated(emulator: str, processor: str) -> list[str]:
    """The command line of Python on an emulated processor."""
    root = EMULATED / "root"
    return [emulator, "-L", str(root), "-cpu", processor, str(root / "usr" / "bin" / PYTHON)]


def environment() -> dict[str, str]:
    """The environment variables with which that Python finds Quire and all packages."""
    paths = [EMULATED / "package", EMULATED / "site", Path(sysconfig.get_path("purelib"))]
    # torch's threads would spin while they wait, and the emulator would run that too. Its tanh for SVE, which defines
    # softcap, takes denormals for zeros.
    torch_settings = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    return {**os.environ, **torch_settings, "PYTHONPATH": os.pathsep.join(map(str, paths))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
