"""The LoRA adapters that requests may name: their names, and what their files contained when they were added."""

from collections.abc import Callable, Iterator, Set

from quire.common.errors import CheckpointError, InvalidParamsError, RequestError
from quire.common.lora import KnownAdapter, LoRARequest
from quire.config.checkpoint.location import adapter_folder
from quire.config.lora import LoRAConfig
from quire.config.machine import format_bytes
from quire.config.model import ModelConfig

AnyAdapter = LoRARequest | KnownAdapter | None
"""A request's adapter, as callers of the engine's interfaces give it."""


class AdapterTable:
    """Owns the names of adapters. LoadedAdapters decides which of them are loaded; files are read again only then.

    A request uses the content that its adapter's name had when the request was added, whatever becomes of the name.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: LoRAConfig | None,
        *,
        on_change: Callable[[Set[str], Set[str]], None] = lambda digests, pinned: None,
    ) -> None:
        """`on_change` receives the digests of all adapters and of the pinned ones when they change."""
        self._model = model
        self._config = config
        self._on_change = on_change
        self._by_name: dict[str, KnownAdapter] = {}
        self._pinned: set[str] = set()  # names
        self._last_id = 0

    def __iter__(self) -> Iterator[KnownAdapter]:
        return iter(tuple(self._by_name.values()))

    def get(self, name: str) -> KnownAdapter | None:
        """The adapter of this name, if there is one."""
        return self._by_name.get(name)

    @property
    def digests(self) -> frozenset[str]:
        """The digests of all adapters."""
        return frozenset(adapter.digest for adapter in self._by_name.values())

    @property
    def pinned(self) -> frozenset[str]:
        """The digests of the pinned adapters."""
        return frozenset(self._by_name[name].digest for name in self._pinned)

    def known(self, request: AnyAdapter) -> KnownAdapter | None:
        """The adapter that a request names, if it needs not be added; otherwise None."""
        if request is None or isinstance(request, KnownAdapter):
            return request
        if not isinstance(request, LoRARequest):
            raise InvalidParamsError(f"lora_request must be a LoRARequest or None, not {type(request).__name__}")
        found = self._by_name.get(request.lora_name)
        is_same = found is not None and (found.lora_int_id, found.path) == (request.lora_int_id, request.path)
        return found if is_same and not request.load_inplace else None

    def of_request(self, request: AnyAdapter) -> KnownAdapter | None:
        """The adapter that a request names, which is added if need be. Raises RequestError."""
        found = self.known(request)
        if found is not None or not isinstance(request, LoRARequest):
            return found
        try:
            return self.add(request)
        except CheckpointError as error:
            raise refused(request, error) from error

    def add(self, request: LoRARequest) -> KnownAdapter:
        """Add an adapter, or replace the content of its name if `load_inplace`. Raises RequestError or CheckpointError,
        and then changes nothing."""
        return self.put(self.inspect(request), replaces=request.load_inplace)

    def inspect(self, request: LoRARequest) -> KnownAdapter:
        """Read an adapter's files without adding it, downloaded first for a hub id; may run in a thread. Raises
        RequestError if it can never be used here, and CheckpointError if it cannot be read or does not belong to the
        model."""
        from quire.models.adapters.peft import inspect_adapter  # only where adapters are used

        config = self.check_enabled()
        folder = adapter_folder(request.path)
        info = inspect_adapter(folder, self._model, config.max_lora_rank)
        limit = config.max_bytes
        if limit is not None and info.num_bytes > limit:
            raise RequestError(
                f"the adapter {request.lora_name!r} takes {format_bytes(info.num_bytes)}, and lora_memory allows "
                f"{format_bytes(limit)} for all adapters that are loaded: raise it"
            )
        base_model_name = request.base_model_name or info.base_model_name
        return KnownAdapter(
            request.lora_name,
            request.lora_int_id,
            str(folder),
            info.digest,
            info.num_bytes,
            request.path,
            base_model_name,
        )

    def check_enabled(self) -> LoRAConfig:
        """The configuration. Raises InvalidParamsError if the engine was made without adapters."""
        if self._config is None:
            raise InvalidParamsError("lora_request: LoRA adapters need an engine made with enable_lora=True")
        return self._config

    def put(self, adapter: KnownAdapter, *, replaces: bool) -> KnownAdapter:
        """Add an adapter that was inspected. Raises RequestError if its name has other content, unless it `replaces`
        that, or if its id is that of another name."""
        known = self._by_name.get(adapter.name)
        if known is not None and known.digest != adapter.digest and not replaces:
            raise RequestError(
                f"the adapter {adapter.name!r} is loaded already with other content, from {known.folder}: choose "
                "another name, or set load_inplace to replace it"
            )
        others = (other for other in self if other.name != adapter.name and other.lora_int_id == adapter.lora_int_id)
        if (other := next(others, None)) is not None:
            raise RequestError(f"lora_int_id={adapter.lora_int_id} is that of the adapter {other.name!r}: use another")
        self._by_name[adapter.name] = adapter
        self._on_change(self.digests, self.pinned)
        return adapter

    def pin(self, lora_id: int) -> bool:
        """Keep an adapter in its slot, from the first request that uses it until it is removed. Returns False if it is
        unknown. Raises RequestError if no slot would be left for others."""
        found = next((adapter for adapter in self if adapter.lora_int_id == lora_id), None)
        if found is None:
            return False
        num_slots = self.check_enabled().max_loras
        if len(self.pinned | {found.digest}) >= num_slots:
            raise RequestError(
                f"the adapter {found.name!r} cannot be pinned: one of the {num_slots} slots must be left for others; "
                "raise max_loras"
            )
        self._pinned.add(found.name)
        self._on_change(self.digests, self.pinned)
        return True

    def remove(self, adapter: int | str) -> bool:
        """Forget an adapter, given by id or name; requests that use it finish. Returns False if it is unknown."""
        found = [known.name for known in self if adapter in (known.lora_int_id, known.name)]
        for name in found:
            del self._by_name[name]
            self._pinned.discard(name)
        self._on_change(self.digests, self.pinned)
        return bool(found)

    def new_id(self) -> int:
        """An id that no adapter has, and that this method has not returned before."""
        self._last_id = 1 + max([self._last_id, *(adapter.lora_int_id for adapter in self)])
        return self._last_id


def refused(request: LoRARequest, error: CheckpointError) -> RequestError:
    """The error of a request whose adapter cannot be added."""
    return RequestError(f"the adapter {request.lora_name!r} cannot be used: {error}")
