"""The five choices of a run, made once in the recipe: ``Pipeline(curate=…, pace=…, credit=…, keep=(…), select=…)``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from astraflow.algorithms.base import Credit, Curate, Keep, Pace, Select, State
from astraflow.algorithms.checks import check_part
from astraflow.errors import ConfigError

ANOTHER = (
    "it was written by another version of this program or of the algorithm: go on with that one, or start a new run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Which task next, may it start, what advantage, train on it, which groups now."""

    curate: Curate
    pace: Pace
    credit: Credit
    keep: tuple[Keep, ...] = ()
    """Asked in order; the first reason counts."""
    select: Select

    def __post_init__(self) -> None:
        if not isinstance(self.keep, tuple | list):
            raise ConfigError(f"Pipeline.keep must be a list of Keep objects, found {type(self.keep).__name__}")
        object.__setattr__(self, "keep", tuple(self.keep))
        check_part("Pipeline.curate", self.curate, Curate)
        check_part("Pipeline.pace", self.pace, Pace)
        check_part("Pipeline.credit", self.credit, Credit)
        check_part("Pipeline.select", self.select, Select)
        for index, keep in enumerate(self.keep):
            check_part(f"Pipeline.keep[{index}]", keep, Keep)

    def state_dict(self) -> State:
        """State of every element that has one, by its place (``curate``, ``keep.0``…); msgpack types and arrays.

        An element without a state of its own may stand around one that has: it is found in fields of dataclasses and
        attributes of algorithms (``credit.credit``, ``credit.shapes.0``). One that is in several places is named once.
        """
        return {place: part.state_dict() for place, part in self._stateful().items()}

    def load_state_dict(self, state: State) -> None:
        """Raises ConfigError when the state is of another composition, or of a version that this one cannot read.

        An algorithm that has got a field more takes older states by a default of it; a field that it does not give
        back is one that it does not know, and to go on without it would be another history. What a field holds is its
        own affair: it may forget tasks that are gone.
        """
        parts = self._stateful()
        if parts.keys() != state.keys():
            raise ConfigError(f"pipeline state is of {sorted(state)}, this recipe has {sorted(parts)}; {ANOTHER}")
        for place, part in parts.items():
            who = f"{place} ({type(part).__name__})"
            try:
                part.load_state_dict(state[place])
            except ConfigError:
                raise
            except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
                said = f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
                raise ConfigError(f"{who} cannot read what is stored of it: {said}; {ANOTHER}") from error
            if unknown := sorted(map(str, state[place].keys() - part.state_dict().keys())):
                raise ConfigError(f"{who} does not know what is stored of it as {', '.join(unknown)}; {ANOTHER}")

    def _stateful(self) -> dict[str, Any]:
        places: dict[str, Any] = {
            "curate": self.curate,
            "pace": self.pace,
            "credit": self.credit,
            **{f"keep.{index}": keep for index, keep in enumerate(self.keep)},
            "select": self.select,
        }
        seen: set[int] = set()
        return {inner: each for place, part in places.items() for inner, each in _within(place, part, seen)}


def _within(place: str, part: object, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What has a state in ``part``, outermost first; whoever has one answers for all inside it."""
    if id(part) in seen or isinstance(part, type):
        return
    seen.add(id(part))
    if callable(getattr(part, "state_dict", None)):
        yield place, part
    elif isinstance(part, tuple | list):
        for index, each in enumerate(part):
            yield from _within(f"{place}.{index}", each, seen)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _within(f"{place}.{field.name}", getattr(part, field.name), seen)
    elif _is_element(type(part)):
        for name, each in vars(part).items() if hasattr(part, "__dict__") else ():
            yield from _within(f"{place}.{name}", each, seen)


_ELEMENTS: dict[type, bool] = {}
"""Which classes are algorithms: looking at a protocol takes 20 us, and a transaction asks this of every part."""


def _is_element(kind: type) -> bool:
    if kind not in _ELEMENTS:
        _ELEMENTS[kind] = any(issubclass(kind, protocol) for protocol in (Curate, Pace, Credit, Keep, Select))
    return _ELEMENTS[kind]
