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
from astraflow.wire.messages import PolicyStatus, StatusReply


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


def test_steps_that_fall_because_another_has_joined_are_named(
    tmp_path: Path, recipe_with: Callable[..., Recipe]
) -> None:
    def status(**versions: int) -> StatusReply:
        found = tuple(PolicyStatus(policy=p, trainable=True, version=v, steps=100) for p, v in versions.items())
        return StatusReply(run="r", state="running", error=None, now_s=0.0, policies=found, components=(), episodes={})

    out = io.StringIO()
    watch = Watch(RunFolder(tmp_path), recipe_with(), Progress(out))
    for each in (status(main=22), status(main=22, late=0), status(main=23, late=23), status(main=23, late=24)):
        watch.show(each)
    steps = [line.partition("step ")[2] for line in out.getvalue().splitlines()]
    assert steps == ["22/100", "0/100 of late", "23/100 of main"]
