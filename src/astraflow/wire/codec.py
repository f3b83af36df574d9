"""Records as msgpack bytes and back; arrays as extension 1, raw and typed. Owns no socket and knows no message.

    ext 1 = dtype code (u8) · dimensions (u8) · zero (u16) · each dimension (u32) · the elements, C order
    everything little-endian

Bytes come from strangers: every failure is a BadRequest, of a broken record an InvalidRecord, in one sentence, and no
message may cost more memory than a small multiple of its own size.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

from astraflow.errors import BadRequest, InvalidRecord, TooLarge
from astraflow.types import Array
from astraflow.wire.finite import require_finite
from astraflow.wire.scan import MAX_ELEMENTS, require_bounded

R = TypeVar("R", bound=msgspec.Struct)

ARRAY = 1
"""Number of the msgpack extension that holds an array."""
MAX_DIMENSIONS = 8
MAX_SENTENCE = 300
LIMIT_BYTES = 256 << 20
"""Largest message when the caller names no limit."""
UNSCANNED_BYTES = 64 << 10
"""A message up to this size cannot hold enough elements to hurt (at most 100 bytes of memory for one of its own)."""

DTYPES = {
    1: "|b1",
    2: "|u1",
    3: "|i1",
    4: "<u2",
    5: "<i2",
    6: "<u4",
    7: "<i4",
    8: "<u8",
    9: "<i8",
    10: "<f2",
    11: "<f4",
    12: "<f8",
}
"""Code on the wire → dtype. Codes are never reused. bfloat16 travels as the u2 of its bits."""
_DTYPE_OF = {code: np.dtype(text) for code, text in DTYPES.items()}
_CODE_OF = {dtype: code for code, dtype in _DTYPE_OF.items()}


def encode(record: msgspec.Struct) -> bytes:
    """The bytes of a record. InvalidRecord names what cannot travel: a float that is not finite, a dtype, an object."""
    require_finite(record)
    try:
        return _ENCODER.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRecord(f"{type(record).__name__} cannot be encoded: {sentence(error)}") from error


def decode(data: bytes, kind: type[R], *, limit_bytes: int = LIMIT_BYTES, limit_elements: int = MAX_ELEMENTS) -> R:
    """The record in ``data``. Its arrays are read-only and may be views of ``data``.

    Unknown fields are ignored, so that an older program understands a newer one. TooLarge, BadRequest, InvalidRecord.
    """
    if len(data) > limit_bytes:
        raise TooLarge(f"{kind.__name__} of {len(data)} bytes is over the limit of {limit_bytes}")
    if len(data) > UNSCANNED_BYTES:
        require_bounded(data, kind.__name__, elements=limit_elements)
    try:
        record: R = _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise InvalidRecord(f"{kind.__name__}: {sentence(error)}") from error
    except RecursionError as error:
        raise BadRequest(f"{kind.__name__} is nested too deeply") from error
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"{kind.__name__} is not readable msgpack: {sentence(error)}") from error
    require_finite(record)
    return record


def sentence(error: BaseException) -> str:
    """An error's own words on one short printable line: they may hold what a stranger sent."""
    text = " ".join(str(error).split()).rstrip(".")
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= MAX_SENTENCE else text[: MAX_SENTENCE - 3] + "..."


def pack_array(array: Array) -> bytes:
    """Body of the extension for an array."""
    code = _CODE_OF.get(array.dtype)
    if code is None:
        raise InvalidRecord(
            f"an array of dtype {array.dtype.str} cannot travel; use one of {', '.join(DTYPES.values())}"
        )
    if array.ndim > MAX_DIMENSIONS or max(array.shape, default=0) > 0xFFFFFFFF:
        raise InvalidRecord(
            f"an array of shape {array.shape} cannot travel: at most {MAX_DIMENSIONS} dimensions of u32"
        )
    head = struct.pack(f"<BBH{array.ndim}I", code, array.ndim, 0, *array.shape)
    return head + array.tobytes()


def unpack_array(body: memoryview | bytes) -> Array:
    """The array in an extension's body: a read-only view of it, copied only where it is not aligned."""
    if len(body) < 4:
        raise InvalidRecord(f"an array extension needs at least 4 bytes, found {len(body)}")
    code, ndim, zero = struct.unpack_from("<BBH", body)
    dtype = _DTYPE_OF.get(code)
    if dtype is None or zero != 0 or ndim > MAX_DIMENSIONS or len(body) < 4 + 4 * ndim:
        raise InvalidRecord(f"an array extension has a wrong head (dtype code {code}, {ndim} dimensions)")
    shape = struct.unpack_from(f"<{ndim}I", body, 4)
    start = 4 + 4 * ndim
    wanted = math.prod(shape) * dtype.itemsize
    if len(body) - start != wanted:
        raise InvalidRecord(f"an array of {dtype} {list(shape)} needs {wanted} bytes, found {len(body) - start}")
    array: Array = np.frombuffer(body, dtype, math.prod(shape), start) if wanted else np.empty(0, dtype)
    if code == 1 and wanted and array.view(np.uint8).max() > 1:
        raise InvalidRecord("an array of bool must hold only 0 and 1")
    if not array.flags.aligned:
        array = array.copy()
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(ARRAY, pack_array(value))
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    raise InvalidRecord(f"an object of type {type(value).__name__} cannot travel")


def _from_ext(code: int, body: memoryview) -> Any:
    if code != ARRAY:
        raise InvalidRecord(f"msgpack extension {code} is unknown")
    return unpack_array(body)


def _from_wire(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise InvalidRecord(f"expected an array, found {type(value).__name__}")
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)


@functools.cache
def _decoder(kind: type[R]) -> msgspec.msgpack.Decoder[R]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_from_ext, dec_hook=_from_wire)
