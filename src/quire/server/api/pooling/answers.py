"""What the endpoints of pooled vectors answer: lists with a row for each text, and vectors as text or as bytes."""

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from quire.common.outputs import PoolingOutput, PoolingRequestOutput
from quire.server.api.pooling import protocol as api
from quire.server.api.shared.fields import Usage
from quire.server.http.endpoint import json_response
from quire.server.http.state import RequestContext

Output = PoolingRequestOutput[PoolingOutput]
Numbers = npt.NDArray[np.float32]

BYTES = "application/octet-stream"
"""Media type of vectors that are sent as they are."""
_QUICK_NUMBERS = 10_000
"""Numbers that are written as JSON within a few milliseconds."""
_ORDERS: dict[str, Literal["=", "<", ">"]] = {"native": "=", "little": "<", "big": ">"}


def usage_of(outputs: Sequence[Output]) -> Usage:
    """The usage of all prompts together."""
    num_tokens = sum([len(output.prompt_token_ids) for output in outputs])
    return Usage.of(num_tokens, 0, sum([output.num_cached_tokens for output in outputs]))


async def rows_response(
    context: RequestContext,
    kind: tuple[type[api.ListResponse], str],
    outputs: Sequence[Output],
    rows: Sequence[Callable[[], msgspec.Struct]],
    num_numbers: int,
) -> Response:
    """The answer with these rows, of the type and with the beginning of the id that `kind` says."""

    def make() -> Response:
        data: Any = [msgspec.Raw(msgspec.json.encode(row())) for row in rows]  # threads run between any two
        return json_response(_listed(context, kind, outputs, data))

    return await made_response(make, num_numbers)


async def made_response(make: Callable[[], Response], num_numbers: int) -> Response:
    """What `make` returns; with many numbers it is called in a thread."""
    return make() if num_numbers <= _QUICK_NUMBERS else await asyncio.to_thread(make)


async def vectors_response(
    context: RequestContext,
    kind: tuple[type[api.ListResponse], str],
    body: api.VectorFields,
    outputs: Sequence[Output],
    row: Callable[[int, Any], msgspec.Struct],
) -> Response:
    """The vectors as the body asks for them: in rows, which `row` makes, or as bytes one after another."""
    vectors = [output.outputs.data for output in outputs]
    if not (body.encoding_format or "").startswith("bytes"):
        rows = [partial(_vector_row, row, i, each, body) for i, each in enumerate(vectors)]
        return await rows_response(context, kind, outputs, rows, num_numbers(outputs))
    dtype, order = _form(body)
    parts = [packed(each, dtype, order) for each in vectors]
    headers: dict[str, str] = {}
    if body.encoding_format == "bytes":
        ends = np.cumsum([len(part) for part in parts]).tolist()
        places: Any = [
            api.BytesData(
                index=i, embed_dtype=dtype, endianness=order, start=end - len(part), end=end, shape=list(vector.shape)
            )
            for i, (part, vector, end) in enumerate(zip(parts, vectors, ends, strict=True))
        ]
        described = msgspec.json.encode(_listed(context, kind, outputs, places))
        headers["metadata"] = described.decode("ascii", "backslashreplace")
    return Response(b"".join(parts), headers=headers, media_type=BYTES)


def _listed(
    context: RequestContext, kind: tuple[type[api.ListResponse], str], outputs: Sequence[Output], data: Any
) -> api.ListResponse:
    name, usage = f"{kind[1]}-{context.request_id}", usage_of(outputs)
    return kind[0](id=name, created=int(time.time()), model=context.model, data=data, usage=usage)


def _vector_row(row: Callable[[int, Any], msgspec.Struct], i: int, vector: Numbers, body: api.VectorFields) -> Any:
    if body.encoding_format != "base64":
        return row(i, vector.tolist())
    return row(i, base64.b64encode(packed(vector, *_form(body))).decode())


def _form(body: api.VectorFields) -> tuple[api.EmbedDType, api.Endianness]:
    return body.embed_dtype or "float32", body.endianness or "native"


def num_numbers(outputs: Sequence[Output]) -> int:
    """The number of all numbers in the outputs."""
    return sum([output.outputs.data.size for output in outputs])


def signs(numbers: Numbers) -> npt.NDArray[np.int16]:
    """The signs of eight numbers in each element, from 0 to 255: the first in its highest bit, which is 0 if the number
    is negative."""
    return np.packbits(numbers >= 0).astype(np.int16)


def packed(numbers: Numbers, dtype: api.EmbedDType = "float32", order: api.Endianness = "little") -> bytes:
    """Numbers as bytes of this type, rounded to the nearest, in this order of bytes."""
    made: npt.NDArray[Any]
    if dtype == "bfloat16":  # the upper half of a float32; a tie goes to the even one
        bits = numbers.astype(np.float32).view(np.uint32)
        made = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    else:
        made = numbers.astype(dtype)
    return made.astype(made.dtype.newbyteorder(_ORDERS[order])).tobytes()
