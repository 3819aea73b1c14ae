"""LoRA adapters: as callers name them, and as they were found when they were added."""

from __future__ import annotations

from os import PathLike
from typing import Any

import msgspec

from quire.common.errors import InvalidParamsError
from quire.common.params.checks import check_flag, check_int, check_text, refuse

MAX_NAME_LEN = 200
MAX_PATH_LEN = 4096
"""As Linux has it. Resolving the links of a path takes time that grows with the square of its length."""


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter for a request, with vLLM's names and positions. Raises InvalidParamsError.

    An adapter is added when a request names it for the first time, and is known by its name from then on.
    """

    lora_name: str
    lora_int_id: int
    """An id from 1 that no adapter of another name has."""
    lora_path: str = ""
    """The folder (a text or a path), as PEFT saves it: adapter_config.json and adapter_model.safetensors. Or a hub id
    `org/name`, whose files of these names are downloaded."""
    base_model_name: str | None = None
    """Shown in /v1/models as the adapter's parent; None for the served model's name."""
    tensorizer_config_dict: dict[str, Any] | None = None
    """Must be None: vLLM's tensorizer is not supported."""
    load_inplace: bool = False
    """Read the folder again: if its content has changed, this request and later ones use the new content."""

    def __post_init__(self) -> None:
        check_name("lora_name", self.lora_name)
        check_int("lora_int_id", self.lora_int_id, 1, 2**63 - 1, "an integer from 1")
        if not isinstance(self.lora_path, str | PathLike) or not str(self.lora_path).strip():
            raise refuse("lora_path", self.lora_path, "the folder of an adapter")
        if len(self.path) > MAX_PATH_LEN:
            raise InvalidParamsError(
                f"lora_path has {len(self.path):,} characters; at most {MAX_PATH_LEN:,} are allowed"
            )
        if self.base_model_name is not None:
            check_name("base_model_name", self.base_model_name)
        if self.tensorizer_config_dict:
            raise InvalidParamsError("tensorizer_config_dict is not supported: give lora_path, a folder saved by PEFT")
        check_flag("load_inplace", self.load_inplace)

    @property
    def name(self) -> str:
        """The same as `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The same as `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The same as `lora_path`, as text."""
        return str(self.lora_path)


class KnownAdapter(msgspec.Struct, frozen=True):
    """An adapter as its files were when it was added. A request keeps the one that it began with."""

    name: str
    lora_int_id: int
    folder: str
    """The absolute path of its files."""
    digest: str
    """Identifies everything that determines its results: adapters with the same digest are the same."""
    num_bytes: int
    """Memory that it takes in a slot."""
    path: str
    """Its `lora_path` as a request gave it."""
    base_model_name: str | None = None

    @property
    def request(self) -> LoRARequest:
        """A request for it."""
        return LoRARequest(self.name, self.lora_int_id, self.path, self.base_model_name)


def check_name(name: str, value: Any) -> None:
    """Raise InvalidParamsError unless the value can be the name of an adapter."""
    check_text(name, value, MAX_NAME_LEN)
    if not value.strip() or not value.isprintable():
        raise refuse(name, value, f"1 to {MAX_NAME_LEN} printable characters")
