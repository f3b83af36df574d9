"""Counts the elements of a msgpack message and its nesting before anything is built from it.

A message of one-byte elements would otherwise cost a hundred times its size in memory. Strings, bytes and extensions
are stepped over: real messages are mostly arrays, so a scan takes microseconds.
"""

from __future__ import annotations

from astraflow.errors import BadRequest

MAX_ELEMENTS = 2_000_000
"""Of one message: a batch of 1,000 rows with a hundred spans each has a quarter of this."""
MAX_DEPTH = 64

# First byte → (size of the length that follows, what the length counts, fixed bytes beside it).
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xC0: 0, 0xC2: 0, 0xC3: 0}
_BYTES = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_BYTES |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_HOLDS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def require_bounded(data: bytes, what: str, *, elements: int = MAX_ELEMENTS, depth: int = MAX_DEPTH) -> None:
    """Raise BadRequest if the message holds more elements, is nested deeper, or ends early."""
    at, size, left = 0, len(data), elements
    open_: list[int] = []
    pending = 1
    while pending or open_:
        if pending == 0:
            pending = open_.pop()
            continue
        if at >= size:
            raise BadRequest(f"{what} ends early at byte {at}")
        pending -= 1
        left -= 1
        if left < 0:
            raise BadRequest(f"{what} has more than {elements} elements")
        at, holds = _step(data, at, what)
        if holds:
            if holds > size - at:
                raise BadRequest(f"{what} announces {holds} elements at byte {at} and has {size - at} bytes left")
            open_.append(pending)
            if len(open_) > depth:
                raise BadRequest(f"{what} is nested deeper than {depth}")
            pending = holds


def _step(data: bytes, at: int, what: str) -> tuple[int, int]:
    """Where the next element starts, and how many elements this one holds."""
    first = data[at]
    at += 1
    if first <= 0x7F or first >= 0xE0:
        return at, 0
    if first <= 0x8F:
        return at, 2 * (first & 0x0F)
    if first <= 0x9F:
        return at, first & 0x0F
    if first <= 0xBF:
        return at + (first & 0x1F), 0
    if first in _FIXED:
        return at + _FIXED[first], 0
    if first in _BYTES:
        width, beside = _BYTES[first]
        return at + width + beside + int.from_bytes(data[at : at + width], "big"), 0
    if first in _HOLDS:
        width, times = _HOLDS[first]
        return at + width, times * int.from_bytes(data[at : at + width], "big")
    raise BadRequest(f"{what} is not readable msgpack: byte 0x{first:02x} at {at - 1}")
