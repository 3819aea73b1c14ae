"""What all parameters have in common: errors for unknown names, copies, and assignments that are checked."""

import copy
from typing import Any, ClassVar, Self

import msgspec

from quire.common.arguments.vllm_arguments import Kind, translate
from quire.common.errors import InvalidParamsError
from quire.common.params.checks import plain

_PLAIN = frozenset({int, float, bool, str, list, dict, type(None)})  # those are no numbers of NumPy or torch


class NamesChecked(msgspec.StructMeta):
    """Makes an unknown name an InvalidParamsError that suggests the nearest. Accepts vLLM's other names, and numbers
    of NumPy and torch."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805  it is a metaclass
        for name, value in fields.items():
            if type(value) not in _PLAIN:
                fields[name] = plain(value)
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            own: tuple[str, ...] = cls.__struct_fields__
            if fields.keys() <= set(own):
                raise
            fields = translate(cls.kind, fields, own, InvalidParamsError, "parameter")  # type: ignore[attr-defined]
        return super().__call__(*args, **fields)


class Params(msgspec.Struct, metaclass=NamesChecked):
    """Parameters of a request. A value that is assigned later is checked as the constructor checks it."""

    kind: ClassVar[Kind]
    """Names the arguments of vLLM that belong to the same class."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, name)
        super().__setattr__(name, plain(value))
        try:
            self.__post_init__()
        except Exception:
            super().__setattr__(name, before)
            raise

    def __post_init__(self) -> None:
        """Check all fields. Raises InvalidParamsError."""

    def clone(self) -> Self:
        """Return a copy that shares nothing that can be changed."""
        return copy.deepcopy(self)


def shares_of(tenant: str) -> tuple[str, str]:
    """Return the names by which what a tenant uses is counted: first that of the API key, to which servers add a
    request's `user` after a slash, with the slash, so that no tenant has it; then its own."""
    return tenant.partition("/")[0] + "/", tenant
