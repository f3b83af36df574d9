"""A dataflow that does not come to listen: the launcher says so, and what is known of it; it never waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from astraflow.errors import RunFailed
from astraflow.run import supervisor
from astraflow.run.child import Child
from astraflow.run.layout import RunFolder
from astraflow.run.recipe import Recipe
from astraflow.run.supervisor import Listen, Supervisor
from astraflow.wire.tokens import Tokens


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "dataflow does not listen after 0 s: nothing in the log"),
        (2, "dataflow did not start: nothing in the log"),
    ],
)
def test_who_does_not_listen_is_named(
    recipe_with: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int | None,
    words: str,
) -> None:
    async def start(spec: object) -> object:
        return SimpleNamespace(code=code, started_s=0.0, last_words=lambda: "nothing in the log")

    recipe = recipe_with()
    Tokens.make(recipe.trainable).write(tmp_path)
    monkeypatch.setattr(supervisor, "START_S", 0.0)
    monkeypatch.setattr(Child, "start", start)
    made = Supervisor(RunFolder(tmp_path), SimpleNamespace(recipe=recipe), listen=Listen())  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=f"^{words}$"):
        asyncio.run(made._start_dataflow())
