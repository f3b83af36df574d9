"""A process that ended by itself with 0 is not started again, and the launcher says so once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from astraflow.dataflow.settings import Limits
from astraflow.errors import RunFailed
from astraflow.run.child import Child, ChildSpec
from astraflow.run.layout import RunFolder
from astraflow.run.post import Post
from astraflow.run.supervisor import Listen, Supervisor
from astraflow.run.useful import Useful
from astraflow.wire.calls import Role
from astraflow.wire.messages import ComponentReport, ComponentStatus, StatusReply
from astraflow.wire.tokens import Tokens

NAME = "rollout-0"


def status(*, state: str = "running", component: str = "left", why: str = "it was told to stop") -> StatusReply:
    report = ComponentReport(doing="left", why=why)
    worker = ComponentStatus(component="rollout", name=NAME, state=component, heard_s=0.1, report=report)
    return StatusReply(run="r", state=state, error=None, now_s=1.0, policies=(), components=(worker,), episodes={})


class Gone:
    """A child that has ended."""

    started_s = 0.0

    def __init__(self, code: int, sentence: str | None = None) -> None:
        self.code, self.sentence = code, sentence

    def last_words(self) -> str:
        return self.sentence or "nothing in the log"


def supervisor(folder: Path, said: list[str], starts: list[str], monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    Tokens.make(["p"]).write(folder)
    resolved = SimpleNamespace(recipe=SimpleNamespace(limits=Limits()))
    made = Supervisor(RunFolder(folder), cast("Any", resolved), listen=Listen(), say=said.append)
    spec = ChildSpec(name=NAME, arguments=("rollout", "--name", NAME), environment={}, log=folder / "log")
    post = Post(spec=spec, role=Role.WORKER, policy=None, starts=1)
    post.useful = Useful(role=Role.WORKER, name=NAME, policy=None)
    made._posts[NAME] = post

    async def start(spec: ChildSpec) -> Any:
        starts.append(spec.arguments[-1])
        return Gone(0)

    monkeypatch.setattr(Child, "start", start)
    return made


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (status(), ["rollout-0 has left: it was told to stop; it is not started again"]),
        (status(component="alive"), ["rollout-0 has left; it is not started again"]),
        (status(state="finished"), []),
    ],
)
def test_who_left_on_purpose_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: StatusReply, words: list[str]
) -> None:
    said: list[str] = []
    starts: list[str] = []
    made = supervisor(tmp_path, said, starts, monkeypatch)
    made._posts[NAME].child = cast("Any", Gone(0))

    async def main() -> None:
        for _ in range(3):
            await made._fill_posts()
            made._say_who_left(seen)

    asyncio.run(main())
    assert starts == [] and said == words


def test_who_died_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    starts: list[str] = []
    made = supervisor(tmp_path, said, starts, monkeypatch)
    made._posts[NAME].child = cast("Any", Gone(-9))
    asyncio.run(made._fill_posts())
    assert starts == ["rollout-0.2"] and "died with signal SIGKILL" in said[0]


@pytest.mark.parametrize(
    ("gone", "line", "end"),
    [
        (Gone(7), "exit code 7 after", "the last time with exit code 7: nothing in the log"),
        (Gone(-6), "signal SIGABRT after", "the last time with signal SIGABRT: nothing in the log"),
        (Gone(1, "the base of main is gone"), ": the base of main is gone", "exit code 1: the base of main is gone"),
    ],
)
def test_a_death_is_told_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: Gone, line: str, end: str
) -> None:
    said: list[str] = []
    made = supervisor(tmp_path, said, [], monkeypatch)
    post = made._posts[NAME]

    async def die() -> None:
        for _ in range(3):
            post.child = cast("Any", gone)
            await made._fill_posts()

    with pytest.raises(RunFailed) as caught:
        asyncio.run(die())
    deaths = [each for each in said if "died with" in each]
    assert len(deaths) == 3 and all(line in each for each in deaths)
    assert str(caught.value).startswith("rollout-0 died 3 times in a row, the last time with ")
    assert str(caught.value).endswith(end)
