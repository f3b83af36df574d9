"""What a person sees of a run that goes on."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.observe.progress import QUIET_S, Progress
from astraflow.run.layout import RunFolder
from astraflow.run.recipe import Recipe
from astraflow.run.watch import Watch
from astraflow.wire.messages import StatusReply


def test_failures_are_seen_in_a_run_that_has_nothing_else(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {"failed/timeout": 2592.0, "failed/infra": 3.0, "episodes_done": 0.0}
    episodes = {"given_up": 864, "leased": 48}
    status = StatusReply(
        run="r",
        state="running",
        error=None,
        now_s=0.0,
        policies=(),
        components=(),
        episodes=episodes,
        counters=counters,
    )
    out = io.StringIO()
    watch = Watch(RunFolder(tmp_path), recipe_with(), Progress(out))
    watch.show(status)
    assert "failures" not in out.getvalue()
    later = watch._began - QUIET_S - 1
    monkeypatch.setattr(watch, "_began", later)
    watch.show(status)
    assert "failures: infra 3, timeout 2592; 864 episodes given up" in out.getvalue()
