"""What a rollout process is built of: the parts know each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest

from astraflow.observe.waits import Wait
from astraflow.rollout.play import WorkflowPlayer
from astraflow.run.config import resolve
from astraflow.run.serve_rollout import build_rollout
from astraflow.weights.store import DirStore
from tests.e2e.conftest import GOOD, RECIPE


def test_the_player_tells_the_service_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path / "models"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    recipe = tmp_path / f"waits_{tmp_path.name.replace('-', '_')}.py"
    recipe.write_text(RECIPE.format(body=GOOD))
    store = DirStore(tmp_path / "weights")
    service = build_rollout(resolve(str(recipe)), cast("Any", None), name="w", store=store, cache=tmp_path / "cache")
    player = service._players[""]
    assert isinstance(player, WorkflowPlayer)
    with player.waiting(Wait.ENGINE), player.waiting(Wait.GRADER):
        pass
    assert {"wait_s/engine", "wait_s/grader"} <= set(service.activity.report({}).metrics)
    assert player.hold == service.hold
