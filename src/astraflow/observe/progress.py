"""What a person sees of a run: a live block on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, TextIO

from astraflow.observe.terminal import harmless

QUIET_S = 30.0
"""Nothing new for so long: the plain output says what everybody does or waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The run now."""

    run: str
    elapsed_s: float
    version: int
    """Committed steps of the policy that has most still to do."""
    steps: int
    policy: str = ""
    """Which that is, where several are trained: one that has joined begins at 0."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Policy → its mean reward in the groups of its latest step."""
    accuracy: float | None = None
    """Latest held-out score."""
    accuracy_version: int | None = None
    coverage: float = 1.0
    """Share of its episodes that could be graded: the others count as wrong."""
    staleness: float | None = None
    """Mean age at use of the latest step."""
    tokens_per_s: float | None = None
    """Sampled by all rollout services."""
    parts: dict[str, str] = field(default_factory=dict)
    """Component → what it does or waits for."""
    note: str = ""


class Progress:
    """``show`` as often as you like; plain output prints what is new, after a quiet while what everybody waits for."""

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_live = self._stream.isatty() if live is None else live
        self._live: Any = None
        self._printed: tuple[str, int, int | None, str] | None = None
        self._said_s: float | None = None

    def __enter__(self) -> Progress:
        if self._is_live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, snapshot: Snapshot) -> None:
        if self._live is not None:
            self._live.update(_block(snapshot))
            return
        state = (snapshot.policy, snapshot.version, snapshot.accuracy_version, snapshot.note)
        is_quiet = self._said_s is not None and snapshot.elapsed_s - self._said_s >= QUIET_S
        if state != self._printed or is_quiet:
            self._printed, self._said_s = state, snapshot.elapsed_s
            self.say(plain_line(snapshot))
            if is_quiet:
                for name, text in snapshot.parts.items():
                    self.say(f"          {name}: {text}")

    def say(self, line: str) -> None:
        """A line that stays."""
        line = harmless(line)
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)


def plain_line(snapshot: Snapshot) -> str:
    """``[ 81 s] step 12/60  reward 0.31  held-out 0.20 (v8)  staleness 1.0  410 tokens/s``"""
    whose = f" of {snapshot.policy}" if snapshot.policy else ""
    cells = [f"[{snapshot.elapsed_s:4.0f} s] step {snapshot.version}/{snapshot.steps}{whose}"]
    if snapshot.rewards:
        named = len(snapshot.rewards) > 1
        values = (f"{name} {value:.2f}" if named else f"{value:.2f}" for name, value in snapshot.rewards.items())
        cells.append(f"reward {' '.join(values)}")
    if snapshot.accuracy is not None:
        graded = "" if snapshot.coverage == 1.0 else f", only {snapshot.coverage:.0%} graded"
        cells.append(f"held-out {snapshot.accuracy:.2f} (v{snapshot.accuracy_version}{graded})")
    if snapshot.staleness is not None:
        cells.append(f"staleness {snapshot.staleness:.1f}")
    if snapshot.tokens_per_s is not None:
        cells.append(f"{snapshot.tokens_per_s:.0f} tokens/s")
    if snapshot.note:
        cells.append(snapshot.note)
    return "  ".join(cells)


def _block(snapshot: Snapshot) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, text in snapshot.parts.items():
        table.add_row(Text(harmless(name), style="bold"), Text(harmless(text)))
    bar = ProgressBar(total=max(snapshot.steps, 1), completed=snapshot.version, width=60)
    return Group(Text(harmless(plain_line(snapshot))), bar, table)
