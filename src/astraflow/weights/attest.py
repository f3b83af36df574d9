"""Does an engine hold what was published? If not, which of the known ways to fail was it. Pure.

    tensors that it shows ─► bits beside those of the files  ─► never applied · wrong base · partial · numerics
    log-probs that it says ─► those of a canary (``weights.canary``) ─► stale cache · wrong template, or one of these

Where an engine computes in another dtype than the files have, the files' bits are rounded as it must have rounded them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from astraflow.types import Array
from astraflow.weights.tensors import SIZES, Tensor

FEW = 8
"""Elements that may be an accident of the memory; an update that went wrong leaves more."""
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Diagnosis(StrEnum):
    """What went wrong with a version on its way into an engine."""

    NEVER_APPLIED = "never applied"
    WRONG_BASE = "wrong base"
    PARTIAL = "partial"
    STALE_CACHE = "stale cache"
    WRONG_TEMPLATE = "wrong template"
    NUMERICS = "numerics"


class Finding(NamedTuple):
    """A diagnosis and what it was concluded from."""

    diagnosis: Diagnosis
    what: str

    def __str__(self) -> str:
        return f"{self.diagnosis.value}: {self.what}"


class _Wrong(NamedTuple):
    """The elements of one tensor that is not as published."""

    name: str
    size: int
    wrong: int
    """Elements that are."""
    old: int
    """Of these, as in the version before."""
    kept: int
    """Of these, where no update had to do anything: the version before is there as the new one."""
    bits: int
    """That differ from the published ones."""
    first: int
    """The first wrong element."""


def compare(held: Iterable[Tensor], new: Mapping[str, Tensor], old: Mapping[str, Tensor] | None) -> Finding | None:
    """None: every tensor of ``new`` is held to the bit. ``old``: the version before, if it is known."""
    seen: set[str] = set()
    wrong: list[Tensor] = []
    for tensor in held:
        seen.add(tensor.name)
        want = new.get(tensor.name)
        if want is None:
            if not any(_same(tensor, as_dtype(other, tensor.dtype)) for other in new.values()):
                return Finding(Diagnosis.PARTIAL, f"tensor {tensor.name} is held and was not published")
        elif want.shape != tensor.shape:
            found, right = list(tensor.shape), list(want.shape)
            return Finding(Diagnosis.PARTIAL, f"tensor {tensor.name} has shape {found} instead of {right}")
        elif not _same(tensor, as_dtype(want, tensor.dtype)):
            wrong.append(tensor)
    missing = sorted(name for name in new.keys() - seen if not _is_tied(name, new, seen))
    if missing:
        return Finding(Diagnosis.PARTIAL, f"{_named('tensor', missing)} of {len(new)} not held")
    if not wrong:
        return None
    return _swapped(wrong, new) or _judge(wrong, new, old)


def as_dtype(tensor: Tensor, dtype: str) -> Tensor:
    """A tensor of floats as an engine that computes in ``dtype`` must hold it: rounded to the nearest, ties to even."""
    if tensor.dtype == dtype:
        return tensor
    wide = _float32(tensor)
    if dtype == "F32":
        return tensor._replace(dtype=dtype, data=wide.view(np.uint8))
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return tensor._replace(dtype=dtype, data=wide.astype(np.float16).view(np.uint8))
    bits = wide.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    rounded[np.isnan(wide)] = 0x7FC0
    return tensor._replace(dtype=dtype, data=rounded.view(np.uint8))


def _float32(tensor: Tensor) -> Array:
    if tensor.dtype == "BF16":
        return (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if tensor.dtype == "F16":
        return tensor.data.view(np.float16).astype(np.float32)
    return tensor.data.view(np.float32)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and np.array_equal(one.data, other.data)


def _is_tied(name: str, new: Mapping[str, Tensor], seen: set[str]) -> bool:
    """Published under two names: held under the other one."""
    return any(other in new and _same(new[name], new[other]) for other in seen)


def _swapped(wrong: Sequence[Tensor], new: Mapping[str, Tensor]) -> Finding | None:
    """Every wrong tensor is another one as published."""
    holds: dict[str, str] = {}
    for tensor in wrong:
        others = (other for other in wrong if other.name != tensor.name)
        found = next((o.name for o in others if o.name in new and _is(tensor, new[o.name])), None)
        if found is None:
            return None
        holds[tensor.name] = found
    name, other = next(iter(holds.items()))
    more = f", and {len(holds) - 2} more" if len(holds) > 2 else ""
    return Finding(Diagnosis.PARTIAL, f"tensors {name} and {other} are swapped{more}")


def _is(tensor: Tensor, want: Tensor) -> bool:
    return tensor.shape == want.shape and _same(tensor, as_dtype(want, tensor.dtype))


def _judge(wrong: Sequence[Tensor], new: Mapping[str, Tensor], old: Mapping[str, Tensor] | None) -> Finding:
    """By where the wrong elements are and what they are instead."""
    found = [_look(tensor, new, old) for tensor in wrong]
    count = sum(each.wrong for each in found)
    if old is not None and all(each.old == each.wrong for each in found):
        changed = _changed(new, old, wrong[0].dtype)
        if count >= changed:
            return Finding(Diagnosis.NEVER_APPLIED, f"all of {len(new)} tensors are those of the version before")
        what = f"{count} of {changed} elements that the update changes are as before it"
        return Finding(Diagnosis.PARTIAL, f"{what}, in {_named('tensor', _names(found))}")
    if count <= FEW:
        bits = sum(each.bits for each in found)
        where = f"tensor {found[0].name}, element {found[0].first}"
        return Finding(Diagnosis.NUMERICS, f"{_count(bits, 'bit')} in {_count(count, 'element')} flipped, {where}")
    return _foreign(found, new, old)


def _foreign(found: Sequence[_Wrong], new: Mapping[str, Tensor], old: Mapping[str, Tensor] | None) -> Finding:
    """Much of what is held is of neither version."""
    foreign = [each for each in found if each.wrong - each.old > FEW]
    concerned = len(new) if old is None else sum(not _same(new[name], old[name]) for name in new if name in old)
    kept = sum(each.kept for each in foreign)
    if 2 * len(foreign) >= max(1, concerned) and len(foreign) > 1:
        also = f"; also {kept} elements that the update leaves alone" if kept else ""
        return Finding(
            Diagnosis.WRONG_BASE,
            f"{len(foreign)} of {len(new)} tensors are neither as published nor as before{also}",
        )
    if any(2 * each.wrong >= each.size for each in foreign):
        return Finding(Diagnosis.PARTIAL, f"{_named('tensor', _names(foreign))} of {len(new)} of no known version")
    count = sum(each.wrong for each in foreign)
    return Finding(
        Diagnosis.NUMERICS, f"{count} elements of {_named('tensor', _names(foreign))} are of no known version"
    )


def _look(tensor: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor] | None) -> _Wrong:
    unsigned = _UNSIGNED[SIZES[tensor.dtype]]
    have, want = tensor.data.view(unsigned), as_dtype(new[tensor.name], tensor.dtype).data.view(unsigned)
    wrong = have != want
    before = None if old is None else old.get(tensor.name)
    was = None
    if before is not None and before.shape == tensor.shape:
        was = as_dtype(before, tensor.dtype).data.view(unsigned)
    differ = have[wrong] ^ want[wrong]
    return _Wrong(
        name=tensor.name,
        size=len(have),
        wrong=int(wrong.sum()),
        old=0 if was is None else int((wrong & (have == was)).sum()),
        kept=0 if was is None else int((wrong & (want == was)).sum()),
        bits=int(np.unpackbits(differ.view(np.uint8)).sum()),
        first=int(wrong.argmax()),
    )


def _changed(new: Mapping[str, Tensor], old: Mapping[str, Tensor], dtype: str) -> int:
    """Elements that differ between the two where they are held in ``dtype``."""
    count = 0
    for name, tensor in new.items():
        before = old.get(name)
        if before is None or before.shape != tensor.shape:
            count += tensor.data.nbytes // SIZES[tensor.dtype]
        elif not _is_tied(name, new, {other for other in new if other < name}):
            unsigned = _UNSIGNED[SIZES[dtype]]
            now, was = as_dtype(tensor, dtype).data.view(unsigned), as_dtype(before, dtype).data.view(unsigned)
            count += int((now != was).sum())
    return count


def _names(found: Sequence[_Wrong]) -> list[str]:
    return [each.name for each in found]


def _named(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more {what}s" if len(names) > 1 else ""
    return f"{what} {names[0]}{more}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
