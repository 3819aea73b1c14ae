"""Modules of the library whose arithmetic the kernels have. Which these are is tried out on small numbers, not told by
names: theirs and ours must give the same."""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quire import kernels
from quire.models.fallback.attention import Arguments
from quire.models.fallback.modules import CurrentBatch, InnerMLP, RotaryTable, activation_of
from quire.models.layers.norm import Norm, NormShape, make_norm

_ROTATES = "apply_rotary_pos_emb"
"""What the library's attention calls to rotate queries and keys."""


class InnerNorm(nn.Module):
    """In the place of a norm of each row."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> as x."""
        out: Tensor = self.norm(x.contiguous())
        return out


def norm_like(module: nn.Module) -> InnerNorm | None:
    """What computes the same norm, None if the module computes something else."""
    given = {name: each for name, each in module._parameters.items() if each is not None}
    if (
        "weight" not in given
        or not given.keys() <= {"weight", "bias"}
        or any(each.dim() != 1 for each in given.values())
        or module._buffers
        or module._modules
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    (width,) = given["weight"].shape
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if isinstance(eps, float):
        for is_rms, offset in ((True, 0.0), (True, 1.0), (False, 0.0)):
            shape = NormShape(eps, is_rms, has_bias="bias" in given, offset=offset)
            if not (is_rms and shape.has_bias) and _is_same_norm(module, width, shape, given["weight"].dtype):
                return InnerNorm(make_norm(width, shape))
    return None


def _is_same_norm(module: nn.Module, width: int, shape: NormShape, dtype: torch.dtype) -> bool:
    """Tried with rows far above and about as small as epsilon, with two numbers of dimensions, and in the dtype."""
    ours, theirs = make_norm(width, shape), copy.copy(module)
    wanted = {name: _numbers(0.3 + len(name) / 10, width) for name in ours.weight_specs()}
    ours.set_weights(wanted)
    theirs.__dict__["_parameters"] = {name: nn.Parameter(each, requires_grad=False) for name, each in wanted.items()}
    x = _numbers(0.7, 2, 3, width) + 0.2
    x[0] *= max(math.sqrt(shape.eps), 1e-4)
    return _agree(lambda: [theirs(x), theirs(x[None])], lambda: [ours(x), ours(x)[None]]) and _agree(
        lambda: [theirs.to(dtype)(x.to(dtype))], lambda: [ours(x).to(dtype)], 0.05
    )


def mlp_like(module: nn.Module, current: CurrentBatch) -> InnerMLP | None:
    """What computes the same gated MLP, None if the module computes something else."""
    parts = dict(module.named_children())
    linears = [parts.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    kind = activation_of(next(iter(parts.values()))) if len(parts) == 1 else None
    if (
        kind is None
        or any(type(each) is not nn.Linear for each in linears)
        or len({each.bias is None for each in linears[:2] if isinstance(each, nn.Linear)}) != 1
        or module._parameters
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    gate, up, down = _small_linear(6, 8, 0.4), _small_linear(6, 8, 0.5), _small_linear(8, 6, 0.6)
    theirs = copy.copy(module)
    theirs.__dict__["_modules"] = {"gate_proj": gate, "up_proj": up, "down_proj": down, **parts}
    x = _numbers(0.7, 1, 3, 6)
    rows = torch.cat([gate(x[0]), up(x[0])], -1)
    if not _agree(lambda: [theirs(x)], lambda: [down(kernels.gated_activation(rows, kind))[None]]):
        return None
    return InnerMLP(module, kind, current)


def _small_linear(in_features: int, out_features: int, factor: float) -> nn.Linear:
    made = nn.Linear(in_features, out_features, device="meta")
    made.weight = nn.Parameter(_numbers(factor, out_features, in_features), requires_grad=False)
    made.bias = nn.Parameter(_numbers(factor, out_features), requires_grad=False)
    return made


def is_rotary(module: nn.Module) -> bool:
    """Whether it may be such a module."""
    has_positions = "position_ids" in inspect.signature(module.forward).parameters
    return has_positions and not module._parameters and next(module.children(), None) is None


def rotary_step(module: nn.Module, calls: Sequence[Arguments]) -> int | None:
    """How cosines and sines of a module that was called so are laid out: 1 if they are those of the first half twice, 2
    if in equal pairs. None: in another way, or it makes something else."""
    return next((step for step in (1, 2) if all(_is_laid_out(module, call, step) for call in calls)), None)


def _is_laid_out(module: nn.Module, call: Arguments, step: int) -> bool:
    def real(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return torch.zeros(x.shape, dtype=x.dtype)
        return torch.arange(3, 3 + x.numel()).view(x.shape)

    args, kwargs = call
    out = module(*map(real, args), **{name: real(each) for name, each in kwargs.items()})
    if not (isinstance(out, tuple) and len(out) == 2 and all(isinstance(x, Tensor) and x.dim() == 3 for x in out)):
        return False
    half = out[0].shape[-1] // 2
    ways = {1: (slice(0, half), slice(half, None)), 2: (slice(0, None, 2), slice(1, None, 2))}
    return all(torch.equal(*(x[..., part] for part in ways[step])) for x in out)


def make_tables(module: Any, current: CurrentBatch, step: int) -> None:
    """Let a module that makes cosines and sines also make the kernels' table of them."""
    theirs = module.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = theirs(*args, **kwargs)  # [1, num_tokens, rotary_dim]
        current.tables.append(_table(cos, sin, step))
        return cos, sin

    module.forward = forward


def _table(cos: Tensor, sin: Tensor, step: int) -> RotaryTable:
    half = slice(0, cos.shape[-1] // 2) if step == 1 else slice(0, None, 2)
    cos_sin = torch.cat([cos[0, :, half], sin[0, :, half]], -1).float()  # [num_tokens, rotary_dim]
    return RotaryTable(cos, sin, cos_sin, torch.arange(len(cos_sin), device=cos.device))


def use_rotary_kernel(module: Any, current: CurrentBatch, step: int) -> None:
    """Let an attention module of the library rotate by the kernel what it has tables for."""
    forward = type(module).forward
    theirs = getattr(inspect.unwrap(forward), "__globals__", {}).get(_ROTATES)
    if theirs is None:
        return
    ways = {is_part: _interleaved(theirs, step, is_part) for is_part in (False, True)}
    if set(ways.values()) == {None}:
        return

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        table = current.table_of(cos, sin)
        way = ways[cos.shape[-1] < query.shape[-1]]
        if table is None or way is None or others or named or len(table.rows) != query.shape[2] or len(query) != 1:
            return theirs(query, key, cos, sin, *others, **named)
        return tuple(_rotated(x, table, way) for x in (query, key))

    if (own := _calling(forward, rotate)) is not None:
        module.forward = MethodType(own, module)


def _calling(forward: Any, rotate: Callable[..., Any]) -> FunctionType | None:
    """A function that is as `forward`, also where decorators wrap it, but rotates by `rotate`. None: it cannot be made
    so, as nothing tells where a decorator keeps the function that it wraps."""
    if not isinstance(forward, FunctionType):
        return None
    cells = forward.__closure__
    if (wrapped := getattr(forward, "__wrapped__", None)) is not None:
        inner = _calling(wrapped, rotate)
        if inner is None or not any(cell.cell_contents is wrapped for cell in cells or ()):
            return None
        cells = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells or ())
    scope = {**forward.__globals__, _ROTATES: rotate}
    own = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, cells)
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def _rotated(x: Tensor, table: RotaryTable, is_interleaved: bool) -> Tensor:
    """x [1, num_heads, num_tokens, head_dim] -> as x, in new memory: theirs may be read elsewhere."""
    heads = x[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)
    kernels.rotary_embedding(heads, table.rows, table.cos_sin, interleaved=is_interleaved)
    return heads.transpose(0, 1)[None]


@cache
def _interleaved(theirs: Callable[..., Any], step: int, is_part: bool) -> bool | None:
    """How the kernel rotates as the library's function does, given all of a head's dimensions or a part; None: not."""
    width, num_tokens = 4 if is_part else 8, 3
    angles = _numbers(0.8, num_tokens, width // 2)
    wide = torch.cat([angles, angles], -1) if step == 1 else angles.repeat_interleave(2, -1)
    cos, sin = wide.cos()[None], wide.sin()[None]
    table = _table(cos, sin, step)
    query, key = _numbers(0.7, 1, 2, num_tokens, 8), _numbers(0.5, 1, 1, num_tokens, 8)
    for way in (False, True):
        ours = [_rotated(x, table, way) for x in (query, key)]
        if _agree(lambda: list(theirs(query, key, cos, sin)), lambda: ours):  # noqa: B023
            return way
    return None


def _agree(theirs: Callable[[], list[Tensor]], ours: Callable[[], list[Tensor]], tolerance: float = 1e-5) -> bool:
    try:
        with torch.inference_mode():
            given = theirs()
    except Exception:  # whatever the library's code raises where it wants something else
        return False
    return all(
        x.dtype is y.dtype and x.shape == y.shape and torch.allclose(x, y, tolerance, tolerance)
        for x, y in zip(given, ours(), strict=True)
    )


def _numbers(factor: float, *shape: int) -> Tensor:
    """The same each time, about as small as 1."""
    return torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).mul(factor).sin().view(shape)
