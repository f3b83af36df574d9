"""A dataflow that lives and does not answer is said once, when it has lasted, and once more when it is over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SILENT_S = 15.0


@dataclass(kw_only=True, slots=True)
class Silence:
    heard_at: float
    """Seconds of a monotonic clock."""
    told: bool = False

    def see(self, now: float, *, answered: bool, log: Path) -> str | None:
        """What is to be said of it at ``now``, if anything. ``log``: where people should look."""
        if answered:
            was, self.told, self.heard_at = self.told, False, now
            return "dataflow answers again" if was else None
        if self.told or now - self.heard_at < SILENT_S:
            return None
        self.told = True
        return (
            f"dataflow has not answered for {now - self.heard_at:.0f} s: it is stopped (SIGSTOP), or the machine is "
            f"too busy; look into {log}"
        )
