"""A forward pass as one call: kernels recorded, and then replayed without Python between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from quire.common.errors import KernelError
from quire.kernels.backends.workspace import lent, placed
from quire.kernels.checks import KERNEL_ERRORS


class KernelGraph:
    """Kernel calls with their arguments, as CUDA graphs keep them. `Backend.graph` makes one.

    A replay makes the same calls on the same addresses: the caller keeps the inputs in place and writes new values
    there, and outputs go into a Workspace, which must be `recording()`. Nothing but kernels and views may run during a
    recording, or torch's operations that only compute tensors, if it is to hold them; anything else raises KernelError.
    A replay runs on the threads that are current for its caller, whichever were current during the recording.
    """

    def __init__(self, calls: Any) -> None:
        """`calls` is the backend's own list of calls, with `begin`, `end`, `replay` and a length."""
        self._calls = calls

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def record(self, *, with_torch: bool = False) -> Iterator[None]:
        """Record the kernels that this thread calls in the body, and run them at its end, when Python is through and
        does not wait for memory that they read. With torch's operations among them, which may look at what kernels
        have computed, these are recorded too, and all run at once."""
        self._calls.begin(with_torch)
        try:
            with _TorchToo(self._calls) if with_torch else _OnlyViews():  # type: ignore[no-untyped-call]
                yield
        finally:
            self._calls.end()
        if not with_torch:
            self.replay()

    def replay(self) -> None:
        """Run them again."""
        with KERNEL_ERRORS:
            self._calls.replay()


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that is not shielded from torch's compiler. Nothing is compiled here, and the shield would import the
    compiler, which takes more than a second of the first step."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _OnlyViews(UncompiledMode):  # type: ignore[no-untyped-call]
    """Refuses what torch would compute, and memory that a replay could not rely on."""

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
        if not getattr(func, "is_view", False) or not _is_part(out, args):
            raise _missing(func)
        return out


class _TorchToo(UncompiledMode):
    """Puts what torch computes into the Workspace, and the same operations on the same places into the recording."""

    def __init__(self, calls: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._run: list[Callable[[], object]] = []
        self._length = -1
        """Of the recording, when `_run` became its last entry: nothing but torch's operations has followed."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        with self:  # of what is made of other operations, these are seen here
            out = func.decompose(*args, **given)
        if out is not NotImplemented:
            return out
        out = func(*args, **given)
        if _is_part(out, args) and not func._schema.is_mutable:
            return out
        inputs = tree_map_only(Tensor, lent, (tuple(args), dict(given)))
        if func._schema.is_mutable:
            self._add(partial(func._op, *inputs[0], **inputs[1]))
            return out
        outs = (out,) if isinstance(out, Tensor) else out
        if not isinstance(outs, list | tuple) or not all(isinstance(each, Tensor) for each in outs):
            raise _missing(func)
        places = [placed(each) for each in outs]
        variant, into = _variant_with_out(func), [lent(place) for place in places]
        if variant is None:
            self._add(partial(_compute_into, into, func, *inputs[0], **inputs[1]))
        else:
            self._add(partial(variant[0], *inputs[0], **inputs[1], **dict(zip(variant[1], into, strict=True))))
        return places[0] if isinstance(out, Tensor) else type(out)(places)

    def _add(self, call: Callable[[], object]) -> None:
        if len(self._calls) != self._length:
            run = self._run = []
            self._calls.add(lambda: [each() for each in run])
            self._length = len(self._calls)
        self._run.append(call)


def _is_part(out: Any, args: Sequence[Any]) -> bool:
    """Whether a result lies in the memory of the first argument."""
    first = out[0] if isinstance(out, list | tuple) and out else out
    return (
        isinstance(first, Tensor)
        and bool(args)
        and isinstance(args[0], Tensor)
        and first.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
    )


@cache
def _variant_with_out(func: Any) -> tuple[Callable[..., Any], list[str]] | None:
    """The same operation with results where the caller wants them, and the names of these arguments."""
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        outs = [each.name for each in variant._schema.arguments if each.is_out]
        others = [(each.name, str(each.type)) for each in variant._schema.arguments if not each.is_out]
        if outs and others == wanted:
            return variant._op, outs
    return None


def _compute_into(places: Sequence[Tensor], func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """For an operation without such a variant."""
    out = func(*args, **kwargs)
    for place, each in zip(places, [out] if isinstance(out, Tensor) else out, strict=True):
        place.copy_(each)


def _missing(func: Any) -> KernelError:
    return KernelError(
        f"{func} computes, or takes memory that no Workspace keeps, while kernels are recorded: it would "
        "be missing in the replay"
    )
