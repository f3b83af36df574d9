"""Out of a group of errors the one that people must see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from astraflow.errors import AstraFlowError


@contextmanager
def first_cause_only() -> Iterator[None]:
    """Raise the first AstraFlowError of an exception group instead of the group; other groups pass as they are."""
    try:
        yield
    except BaseExceptionGroup as group:
        found, _ = group.split(AstraFlowError)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]  # type: ignore[assignment]
        if found is None:
            raise
        raise found from group
