"""Named points of the code at which a test of faults may end or stop this process. Off unless ASTRAFLOW_CHAOS is set.

    ASTRAFLOW_CHAOS=trainer.before_commit:3    this process is killed when it is there for the third time
    ASTRAFLOW_CHAOS=/a/folder                  a file in it that has a point's name is an order: who gets there first
                                               takes it (renames it), writes down pid and time, and is killed;
                                               one that says "stop" is only stopped, there, until somebody lets it go on

Killed is SIGKILL: nothing is flushed, closed or said, as when the machine takes the memory back. Stopped is SIGSTOP.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

ENVIRONMENT = "ASTRAFLOW_CHAOS"
POINTS = {
    "rollout": ("rollout.before_submit", "rollout.after_submit", "rollout.after_lease"),
    "trainer": (
        "trainer.before_publish",
        "trainer.in_publish",
        "trainer.after_publish",
        "trainer.before_commit",
        "trainer.after_commit",
        "trainer.before_checkpoint",
        "trainer.in_checkpoint",
        "trainer.after_checkpoint",
    ),
    "dataflow": (
        "dataflow.in_transaction",
        "dataflow.after_transaction",
        "dataflow.in_submit",
        "dataflow.in_commit",
    ),
}
"""Component → its points, as they are named in the code."""
TAKEN = ".taken"
STOP = "stop"
"""What an order says that only stops; an empty one kills."""


class _Chaos:
    """What ASTRAFLOW_CHAOS asks for."""

    def __init__(self, wanted: str) -> None:
        self._folder = Path(wanted) if "/" in wanted else None
        self._point, _, count = ("", "", "") if self._folder else wanted.partition(":")
        self._left = int(count or 1)

    def reach(self, point: str) -> None:
        if self._folder is None:
            self._left -= point == self._point
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return
        taken = self._folder / f"{point}{TAKEN}"
        try:
            (self._folder / point).rename(taken)
        except FileNotFoundError:
            return
        only_stop = taken.read_text(encoding="utf-8") == STOP
        taken.write_text(json.dumps({"pid": os.getpid(), "at": time.monotonic()}), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGSTOP if only_stop else signal.SIGKILL)


def give_order(folder: Path, point: str, *, only_stop: bool = False) -> Path:
    """For the next process that gets to ``point``; where it will be found once somebody took it."""
    order = folder / point
    whole = order.with_name(f"{point}.new")  # nobody may take an order that is not written to its end
    whole.write_text(STOP if only_stop else "", encoding="utf-8")
    whole.rename(order)
    return folder / f"{point}{TAKEN}"


_chaos = _Chaos(wanted) if (wanted := os.environ.get(ENVIRONMENT)) else None


def reach(point: str) -> None:
    """This process is at ``point``."""
    if _chaos is not None:
        _chaos.reach(point)
