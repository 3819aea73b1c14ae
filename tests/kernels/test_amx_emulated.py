"""The kernels for AMX on any CPU with AVX-512 BF16: tiles are emulated as Intel's manual defines them.

Where the CPU has tiles, the tests of kernels run on them, and here only the emulation is compared with the CPU.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reliability import sanitized_site
from reliability.sanitize import TILE_TESTS

from .isas import ISAS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Variables of a process that has the extension with emulated instructions."""
    if "avx512_bf16" not in ISAS:
        pytest.skip("all but the instructions on tiles needs AVX-512 BF16")
    folder = tmp_path_factory.mktemp("emulated")
    flags = ["-DQUIRE_EMULATE_AMX=ON", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder}"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHON": sys.executable, "BUILD_DIR": str(folder / "cmake"), "PATH": path, "JOBS": "1"}
    built = subprocess.run(["bash", ROOT / "tools" / "build_inplace.sh", *flags], env=environment, capture_output=True)
    assert built.returncode == 0, built.stdout.decode() + built.stderr.decode()
    shutil.copy(sanitized_site.__file__, folder / "sitecustomize.py")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "src")])}


def run(environment, *arguments):
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif("amx" in ISAS, reason="this CPU has tiles, on which the tests of kernels run")
def test_kernels_on_emulated_tiles_are_the_references_and_do_not_depend_on_the_batch(emulated):
    listed = run(emulated, "-c", "from quire import _native; print(*_native.available_isas())")
    assert listed.split() == ["amx", "portable"]
    assert " passed" in run(emulated, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", "-k", "amx", *TILE_TESTS)


@pytest.mark.slow
@pytest.mark.skipif("amx" not in ISAS, reason="this CPU has no AMX to compare with")
def test_the_emulation_has_the_bits_of_the_processor(emulated):
    digests = run(emulated, "-m", "tests.kernels.amx_digests")
    assert digests == run(os.environ, "-m", "tests.kernels.amx_digests")
    assert len(digests.splitlines()) == 67
