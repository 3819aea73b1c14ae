"""A forward pass as one call: kernels recorded while they run, and replayed without Python between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.common.errors import KernelError
from quire.kernels.checks import kernel_errors


class KernelGraph:
    """Kernel calls with their arguments, as CUDA graphs keep them. `Backend.graph` makes one.

    A replay makes the same calls on the same addresses: the caller keeps the inputs in place and writes new values
    there, and outputs go into a Workspace, which must be `recording()`. Only kernels are recorded, so nothing but
    kernels and views may run during a recording; anything else raises KernelError. A replay runs on the threads that
    are current for its caller, whichever were current during the recording.
    """

    def __init__(self, calls: Any) -> None:
        """`calls` is the backend's own list of calls, with `begin`, `end`, `replay` and a length."""
        self._calls = calls

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the kernels that this thread runs in the body."""
        self._calls.begin()
        try:
            with _OnlyViews():  # type: ignore[no-untyped-call]
                yield
        finally:
            self._calls.end()

    def replay(self) -> None:
        """Run them again."""
        with kernel_errors():
            self._calls.replay()


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what torch would compute, and memory that a replay could not rely on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: the mode is not shielded from torch's compiler. Nothing is compiled here, and the shield would import
        the compiler, which takes more than a second of the first step."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and out.numel() == 0:
            return out
        first = out[0] if isinstance(out, list | tuple) else out
        if (
            not getattr(func, "is_view", False)
            or not isinstance(first, Tensor)
            or first.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
        ):
            raise KernelError(
                f"{func} computes, or takes memory that no Workspace keeps, while kernels are recorded: it would "
                "be missing in the replay"
            )
        return out
