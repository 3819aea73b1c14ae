"""Running a test on each instruction set variant this CPU has, and on any number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire import kernels

native: Any = getattr(kernels.backend_for("cpu"), "native", None)

ISAS: list[str] = ["reference"] if native is None else native.available_isas()

# the variants whose attention rounds probabilities to bfloat16, where the cache is made of it
PAIRED_ISAS = ("avx512_bf16", "amx", "neon_i8mm", "sve256")

needs_native = pytest.mark.skipif(native is None, reason="the native extension is not in use")


@contextmanager
def using(isa: str, num_threads: int = 2) -> Iterator[None]:
    before = kernels.isa(), kernels.num_threads()
    if native is not None:
        assert native.use_isa(isa)
    kernels.set_num_threads(num_threads)
    try:
        yield
    finally:
        if native is not None:
            native.use_isa(before[0])
        kernels.set_num_threads(before[1])
