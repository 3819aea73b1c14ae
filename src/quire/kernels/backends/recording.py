"""A forward pass as one call: kernels recorded while they run, and replayed without Python between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.common.errors import KernelError
from quire.kernels.backend import native
from quire.kernels.checks import native_errors


class KernelGraph:
    """Kernel calls with their arguments, as CUDA graphs keep them.

    A replay makes the same calls on the same addresses: the caller keeps the inputs in place and writes the new ones
    there, and what is put out goes into a Workspace, which must be `recording()`. Only kernels are recorded, so nothing
    but kernels and views may run in between; anything else raises KernelError.
    """

    def __init__(self) -> None:
        if native is None:
            raise KernelError("a KernelGraph needs the native kernels, which are not in use")
        self._graph = native.KernelGraph()

    def __len__(self) -> int:
        return len(self._graph)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the kernels that this thread runs in the body."""
        self._graph.begin()
        try:
            with _OnlyViews():  # type: ignore[no-untyped-call]
                yield
        finally:
            self._graph.end()

    def replay(self) -> None:
        """Run them again."""
        with native_errors():
            self._graph.replay()


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what torch would compute, and memory that may be another's at the replay."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks whether to shield the mode from its compiler. Nothing is compiled here, and the shield imports the
        compiler: more than a second, in the first step of all."""
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
