"""Tensors of safetensors files as views of the mapped file, without torch and without trusting the file.

Numpy has no bfloat16, so a tensor is its name, dtype and shape as the format writes them, and its bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from astraflow.errors import WeightsRefused
from astraflow.types import Array

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
SIZES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
"""Bytes of one element by dtype name."""
MAX_HEADER_BYTES = 100 << 20
MAX_TENSORS = 1_000_000
_NAME_OF = {"b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "f2": "F16", "u4": "U32", "i4": "I32"}
_NAME_OF |= {"f4": "F32", "u8": "U64", "i8": "I64", "f8": "F64"}


class Tensor(NamedTuple):
    """A named tensor as bits."""

    name: str
    dtype: str
    """``BF16``, ``F32`` and so on, as safetensors writes it."""
    shape: tuple[int, ...]
    data: Array
    """uint8 [bytes], little-endian, C order"""


def of_array(name: str, array: Array, *, dtype: str | None = None) -> Tensor:
    """A tensor of a numpy array; ``dtype="BF16"`` where the array is the uint16 of its bits."""
    if not isinstance(array, np.ndarray):
        what = f"{type(array).__module__}.{type(array).__name__}"
        raise WeightsRefused(
            f"tensor {name!r} is a {what}, no numpy array; of torch tensors delta_torch.as_bits makes them"
        )
    found = dtype or _NAME_OF.get(array.dtype.str[1:])
    if found not in SIZES or SIZES[found] != array.dtype.itemsize or array.dtype.byteorder == ">":
        raise WeightsRefused(f"tensor {name}: dtype {array.dtype} cannot be {found or 'a weight'}")
    flat = np.ascontiguousarray(array).reshape(-1)
    return Tensor(name, found, tuple(array.shape), flat.view(np.uint8))


def read_tensors(path: Path) -> list[Tensor]:
    """Every tensor of a file in the order of its bytes, as views of the mapped file. WeightsRefused if malformed."""
    try:
        with path.open("rb") as file:
            # Not closed here: the views below hold it, and the last of them lets it go.
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise WeightsRefused(f"{path.name} cannot be read: {type(error).__name__} {error}") from error
    return list(parse_tensors(data, path.name))


def parse_tensors(data: Array, what: str) -> Iterator[Tensor]:
    """Tensors in the bytes of a safetensors file (uint8 [n]): every byte belongs to exactly one tensor."""
    header, start = _header(data, what)
    entries = []
    for name, entry in header.items():
        if name != "__metadata__":
            entries.append(_entry(name, entry, len(data) - start, what))
    at = 0
    for begin, end, name, dtype, shape in sorted(entries):
        if begin != at:
            raise WeightsRefused(f"{what}: tensor {name!r} begins at {begin}, the one before it ends at {at}")
        at = end
        yield Tensor(name, dtype, shape, data[start + begin : start + end])
    if at != len(data) - start:
        raise WeightsRefused(f"{what}: {len(data) - start - at} bytes after the last tensor")


def read_metadata(data: Array, what: str) -> dict[str, str]:
    """The free text in the header of a safetensors file (uint8 [n]). WeightsRefused if malformed."""
    found = _header(data, what)[0].get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise WeightsRefused(f"{what}: the header's metadata is not text by name")
    return found


def _header(data: Array, what: str) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise WeightsRefused(f"{what}: {len(data)} bytes are too few for a safetensors file")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    if size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise WeightsRefused(f"{what}: the header says that it has {size} bytes, the file has {len(data)}")
    try:
        header = json.loads(data[8 : 8 + size].tobytes().decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WeightsRefused(f"{what}: the header is not JSON ({str(error)[:100]})") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise WeightsRefused(f"{what}: the header is not an object of at most {MAX_TENSORS} tensors")
    return header, 8 + size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _entry(name: str, entry: Any, size: int, what: str) -> tuple[int, int, str, str, tuple[int, ...]]:
    wrong = WeightsRefused(f"{what}: the header's entry of tensor {name[:100]!r} is malformed")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES or not _are_sizes(shape) or not _are_sizes(offsets):
        raise wrong
    if len(offsets) != 2 or len(shape) > 16 or not offsets[0] <= offsets[1] <= size:
        raise wrong
    if math.prod(shape) * SIZES[dtype] != offsets[1] - offsets[0]:
        raise wrong
    return offsets[0], offsets[1], name, dtype, tuple(shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)
