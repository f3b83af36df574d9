"""A process that lives and is not heard of: said when it has lasted, ended when it has lasted too long, said when over.

| process              | is heard of                         | said after | ended after            |
| -------------------- | ----------------------------------- | ---------- | ---------------------- |
| dataflow             | it answers the launcher             | 15 s       | ``limits.hung_after_s``  |
| rollout, trainer     | dataflow does not call it dead      | at once    | ``limits.hung_after_s``  |
| any, before a word   | as above                            | 60 s       | ``first_word_s``         |

What is ended is started again like anything that dies; before it ends it writes where each of its threads is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

ANSWER_S = 15.0
"""A busy dataflow answers late."""
FIRST_TOLD_S = 60.0
GAP_S = 15.0
"""Who did not look for so long (it was stopped itself) knows nothing of what lies between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What is to be done about one process at one look."""

    words: str | None = None
    """To say."""
    end: bool = False
    """The process is to be ended."""


NOTHING = Heard()


@dataclass(kw_only=True, slots=True)
class Silence:
    """Of one started process. Seconds of the launcher's monotonic clock."""

    name: str
    log: Path
    started_at: float
    tell_after_s: float
    first_word_s: float
    hung_after_s: float
    spoke: bool = False
    _since: float = field(init=False)
    _looked_at: float = field(init=False)
    _told: bool = False
    _ended: bool = False

    def __post_init__(self) -> None:
        self._since = self._looked_at = self.started_at

    def see(self, now: float, *, heard: bool) -> Heard:
        """``now``: when it was asked, lest an answer that came late makes the silence longer."""
        if now - self._looked_at > GAP_S:
            self._since = now
        self._looked_at = max(now, self._looked_at)
        if heard:
            told, self._told, self.spoke, self._since = self._told, False, True, now
            return Heard(words=f"{self.name} is heard of again") if told else NOTHING
        silent_s = now - self._since
        limit_s = self.hung_after_s if self.spoke else self.first_word_s
        if silent_s >= limit_s and not self._ended:
            self._ended = True
            return Heard(words=f"{self.name} is ended: {self._state()} for {silent_s:.0f} s; {self._where()}", end=True)
        if self._told or silent_s < (self.tell_after_s if self.spoke else FIRST_TOLD_S):
            return NOTHING
        self._told = True
        words = f"{self.name} lives and {self._state()}: it is stopped (SIGSTOP), hangs, or the machine is too busy"
        return Heard(words=f"{words}; after {limit_s - silent_s:.0f} s more it is ended; look into {self.log}")

    def _state(self) -> str:
        return "is not heard of" if self.spoke else "has not said a word yet"

    def _where(self) -> str:
        return f"where its threads were is at the end of {self.log}, unless it was stopped"
