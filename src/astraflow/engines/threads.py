"""How many threads a decode step takes: whatever was fastest of late, whoever else uses the machine.

A trainer beside the engine comes and goes. While it computes, a second thread costs more than it gives (OpenMP threads
that wait for one that has no core); while it waits, half the machine would lie idle. No setting knows which it is now,
so the engine measures: mostly it decodes with the better number and now and then it tries the other for a few steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median

_TRIAL = 3
"""Steps of a trial; the first warms up and does not count."""
_SHORTEST, _LONGEST = 8, 96
"""Steps between two trials: few after a change, twice as many after each trial that changed nothing."""
_GAIN = 0.92
"""The other number must cost less than this share, lest noise moves it."""
_FIXED_ROWS = 30
"""What a step costs beside its rows, in rows: SmolLM2-135M takes 50 ms for 32 rows and 76 ms for 64."""


class ThreadTuner:
    """Pure: told how long steps took, says what the next one takes.

    ``choices``: numbers of threads; it begins with the first. One choice: always that one.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = list(dict.fromkeys(choices))
        self._own = 0
        self._other = 0
        self._trial: list[float] = []
        self._recent: list[float] = []
        self._left = _SHORTEST
        self._period = _SHORTEST

    @property
    def threads(self) -> int:
        """Of the next step."""
        return self._choices[self._other if self._in_trial else self._own]

    @property
    def _in_trial(self) -> bool:
        return self._left == 0 and len(self._choices) > 1

    def took(self, seconds: float, rows: int) -> None:
        """A step of ``rows`` tokens took so long with ``threads``."""
        if len(self._choices) == 1:
            return
        cost = seconds / (rows + _FIXED_ROWS)
        if self._in_trial:
            self._trial.append(cost)
            if len(self._trial) == _TRIAL:
                self._decide()
            return
        self._recent = [*self._recent[-2 * _TRIAL :], cost]
        self._left -= 1
        if self._left == 0:
            self._other = (self._other + 1) % len(self._choices)
            if self._other == self._own:
                self._other = (self._other + 1) % len(self._choices)

    def _decide(self) -> None:
        better = median(self._trial[1:]) < _GAIN * median(self._recent)
        if better:
            self._own = self._other
            self._recent = self._trial[1:]
        self._period = _SHORTEST if better else min(_LONGEST, 2 * self._period)
        self._left = self._period
        self._trial = []


def available_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
