"""Check that the installed native kernels load and compute, where only numpy and Quire itself are installed.

`make wheels` runs this with every Python, outside the source tree; tools/check_install.py needs torch too.
"""

import importlib
import sys

import numpy as np

_FLOAT32 = 0
_EPS = 1e-6
_ROWS, _WIDTH = 3, 100


def main() -> int:
    """Normalize rows with every instruction set of this CPU; the exit status is 1 if one differs from numpy."""
    native = importlib.import_module("quire._native")
    random = np.random.default_rng(0)
    x = random.standard_normal((_ROWS, _WIDTH), dtype=np.float32)
    weight = random.standard_normal(_WIDTH, dtype=np.float32)
    expected = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS) * weight
    failed = []
    for isa in native.available_isas():
        native.use_isa(isa)
        out = np.zeros_like(x)
        native.rms_norm(
            _FLOAT32, x.ctypes.data, weight.ctypes.data, _EPS, out.ctypes.data, _ROWS, 1, _WIDTH, _WIDTH, _WIDTH
        )
        if not np.allclose(out, expected, rtol=1e-5, atol=1e-6):
            failed.append(isa)
    print(f"Python {sys.version.split()[0]}: {native.__file__} has {', '.join(native.available_isas())}")
    if failed:
        print(f"the results of {', '.join(failed)} differ from numpy's", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
