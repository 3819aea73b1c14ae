"""Items that a request of `/v1/responses` names by their ids, instead of repeating them: `item_reference`."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import msgspec

from quire.server.api.responses.protocol import InputItem
from quire.server.api.responses.run import stored
from quire.server.api.responses.store import MAX_CHAIN, ResponseStore
from quire.server.http.errors import ApiError, invalid

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4,}")


def item_ids(response_id: str) -> Callable[[str], str]:
    """Return what makes the ids of a response's output items from their prefixes. Each contains that of the response,
    by which the item is found again."""
    numbers = itertools.count()
    return lambda prefix: f"{prefix}_{response_id.removeprefix('resp_')}{next(numbers):04x}"


async def read_references(items: list[InputItem], store: ResponseStore, owner: str, max_bytes: int) -> list[InputItem]:
    """The items, with output items of stored responses in the places of references to them.

    Raises ApiError: 404 for an item that this owner does not have, or that was named before; 400 for items of more than
    MAX_CHAIN responses, or of responses that have more than `max_bytes` together.
    """
    outputs: dict[str, dict[str, Any]] = {}
    num_bytes, full = 0, list[InputItem]()
    for i, item in enumerate(items):
        if item.type != "item_reference":
            full.append(item)
            continue
        where, item_id = f"input[{i}].id", item.id or ""
        found = _ITEM_ID.fullmatch(item_id)
        response_id = "" if found is None else f"resp_{found[1]}"
        if response_id and response_id not in outputs:
            response = await stored(store.get(owner, response_id))
            num_bytes += 0 if response is None else len(response.response)
            if len(outputs) == MAX_CHAIN or num_bytes > max_bytes:
                message = f"input: names items of more than {MAX_CHAIN} responses or {max_bytes:,} bytes"
                raise invalid(message, "input")
            outputs[response_id] = {} if response is None else _output(response.response)
        if item_id not in outputs.get(response_id, {}):
            message = f"{where}: no output item {item_id[:100]!r} of a stored response was found, or it was named twice"
            raise ApiError(404, message, param=where, code="item_not_found")
        full.append(msgspec.convert(outputs[response_id].pop(item_id), InputItem))
    return full


def _output(response: bytes) -> dict[str, Any]:
    """The output items of a response by their ids."""
    return {item["id"]: item for item in msgspec.json.decode(response)["output"]}
