"""What launcher, trainer and command line make of policies that join, follow another, or are trained again."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from astraflow.dataflow.store import Store
from astraflow.errors import ConfigError
from astraflow.run.adding import add_policy, split_source
from astraflow.run.checks import check_recipe
from astraflow.run.cli import main
from astraflow.run.initial import publish_initial
from astraflow.run.joined import initial_folder, need_trainers, place_in, place_of
from astraflow.run.journey import journey_of, text_lines
from astraflow.run.layout import RunFolder
from astraflow.run.recipe import Policy, Recipe
from astraflow.run.replay.record import read_record
from astraflow.run.run_db import RunDb
from astraflow.run.samples import answer_pairs, tokenizer_of
from astraflow.run.supervisor import Listen, Supervisor
from astraflow.run.symptoms import symptoms_of
from astraflow.run.tiny_model import TinyModel
from astraflow.types import Manifest, Sampling
from astraflow.weights.manifest import manifest_of_folder, weight_files_in
from astraflow.weights.store import DirStore
from astraflow.wire.goodbye import TOLD, TRAINED
from astraflow.wire.messages import AddedPolicy, ComponentReport, ComponentStatus, PolicyStatus, StatusReply
from astraflow.wire.tokens import Tokens
from tests.unit.dataflow.rig import Rig, make_spec
from tests.unit.run.made_run import MadeRun

MODEL = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, context=32, characters="01")
ADDED = (
    AddedPolicy(name="late", like="main"),
    AddedPolicy(name="idle", like="main", trainable=False),
    AddedPolicy(name="mean", like="main", trainable=False, average_of="main", decay=0.5),
)


def two(**fields: Any) -> dict[str, Any]:
    policies = {"main": Policy(model=MODEL), "old": Policy(model=MODEL, trainable=False, **fields)}
    return {"policies": policies, "roles": {"a": "main", "b": "old"}}


def status(
    *components: ComponentStatus, added: tuple[AddedPolicy, ...] = (), version: int = 3, steps: int = 9
) -> StatusReply:
    main = PolicyStatus(policy="main", trainable=True, version=version, steps=steps)
    return StatusReply(
        run="r",
        state="running",
        error=None,
        now_s=0.0,
        policies=(main,),
        components=components,
        episodes={},
        added=added,
    )


class Flow:
    def __init__(self, found: StatusReply, manifest: Manifest | None = None) -> None:
        self._found, self._manifest = found, manifest

    async def status(self) -> StatusReply:
        return self._found

    async def manifest(self, request: Any) -> Manifest:
        assert (request.policy, request.version) == ("late", 0) and self._manifest is not None
        return self._manifest


# ── recipes ──


def test_an_average_is_of_a_trained_policy_and_not_trained_itself(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with(**two(average_of="main", decay=0.5))
    check_recipe(recipe)
    assert recipe.averages == ("old",)
    with pytest.raises(ConfigError, match=r"\['old'\].average_of is 'old', which is no trained policy \(main\)"):
        check_recipe(recipe_with(**two(average_of="old")))
    with pytest.raises(ConfigError, match="average_of 'x' needs trainable=False"):
        Policy(model=MODEL, average_of="x")
    for decay in (0.0, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"Policy.decay must be in \(0, 1\)"):
            Policy(model=MODEL, decay=decay)


def averaged(model: Any, of: Any) -> dict[str, Any]:
    return {
        "policies": {"s": Policy(model=of), "m": Policy(model=model, trainable=False, average_of="s")},
        "roles": {"a": "s", "b": "m"},
        "sampling": Sampling(max_tokens=8),
    }


UNLIKE = r"Recipe.policies\['m'\].average_of is 's', whose model has another architecture: the two have no average"
WIDE = replace(MODEL, hidden=64)


@pytest.mark.parametrize("as_folders", [False, True])
def test_an_average_is_of_the_same_architecture(
    recipe_with: Callable[..., Recipe], tmp_path: Path, as_folders: bool
) -> None:
    def made(model: TinyModel, name: str) -> Any:
        return model.build(tmp_path / name) if as_folders else model

    one, wide, later = made(MODEL, "one"), made(WIDE, "wide"), made(replace(MODEL, seed=7), "later")
    check_recipe(recipe_with(**averaged(later, of=one)))
    with pytest.raises(ConfigError, match=UNLIKE):
        check_recipe(recipe_with(**averaged(wide, of=one)))


def test_what_only_the_built_folder_tells_is_found_before_the_run_starts(
    recipe_with: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = recipe_with(**averaged(lambda: WIDE.build(tmp_path / "wide"), of=MODEL))
    check_recipe(recipe)
    run = RunFolder(tmp_path / "run")
    run.create()
    with pytest.raises(ConfigError, match=UNLIKE):
        asyncio.run(publish_initial(run, recipe))
    assert not run.initial.exists()


# ── what a trainer's process has to do ──


@pytest.mark.parametrize(("policy", "like"), [("main", "main"), ("late", "main"), ("mean", "main")])
def test_a_trainer_learns_what_its_policy_is_like(recipe_with: Callable[..., Recipe], policy: str, like: str) -> None:
    place = asyncio.run(place_of(recipe_with(**two()), Flow(status(added=ADDED)), policy))  # type: ignore[arg-type]
    assert (place.name, place.like) == (policy, like)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("idle", "policy 'idle' has trainable=False"),
        ("old", "policy 'old' has trainable=False"),
        ("x", "--policy must be one of main, old, late, idle, mean, found 'x'"),
    ],
)
def test_where_there_is_nothing_to_train_it_says_so(
    recipe_with: Callable[..., Recipe], policy: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(place_of(recipe_with(**two()), Flow(status(added=ADDED)), policy))  # type: ignore[arg-type]


def test_what_joined_is_trained_from_its_own_version_0(recipe_with: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = recipe_with(**two())
    other = TinyModel(**{**vars_of(MODEL), "seed": 5}).build(tmp_path / "other")
    store = DirStore(tmp_path / "store")
    for path in weight_files_in(other):
        store.put_blocking(path)
    made = manifest_of_folder(other, "late")
    flow = Flow(status(added=ADDED), made)
    for _ in range(2):  # the second life finds it
        folder = asyncio.run(initial_folder(recipe, flow, store, ADDED[0], tmp_path / "c"))  # type: ignore[arg-type]
        assert manifest_of_folder(folder).digest == made.digest
        assert (folder / "tokenizer.json").exists() and (folder / "config.json").exists()
    place = place_in(recipe, "main")
    assert place is not None
    own = asyncio.run(initial_folder(recipe, flow, store, place, tmp_path / "m"))  # type: ignore[arg-type]
    assert own == recipe.policies["main"].folder()


def vars_of(model: TinyModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


# ── the launcher ──


def left(why: str) -> ComponentStatus:
    return ComponentStatus(
        component="trainer", name="main", state="left", heard_s=1.0, report=ComponentReport(doing="left", why=why)
    )


def launcher(recipe: Recipe, folder: Path) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    Tokens.make(recipe.trainable).write(folder)
    run = SimpleNamespace(path=folder, logs=folder)
    made = Supervisor(run, SimpleNamespace(recipe=recipe), listen=Listen(), say=said.append)  # type: ignore[arg-type]
    made._add_workers("http://127.0.0.1:1")
    return made, said


def test_who_joins_and_every_average_gets_a_trainer_once(recipe_with: Callable[..., Recipe], tmp_path: Path) -> None:
    made, said = launcher(recipe_with(**two(average_of="main")), tmp_path)
    assert set(made._posts) == {"rollout-0", "trainer-main", "trainer-old"}
    for _ in range(2):
        made._staff("http://127.0.0.1:1", status(added=ADDED))
    assert set(made._posts) == {"rollout-0", "trainer-main", "trainer-old", "trainer-late", "trainer-mean"}
    assert said == ["policy late has joined", "policy mean has joined"]
    arguments = made._posts["trainer-late"].spec.arguments
    assert arguments[arguments.index("--policy") + 1] == "late"


@pytest.mark.parametrize(
    ("why", "steps", "again"), [(TRAINED, 9, True), ("", 9, True), (TOLD, 9, False), (TRAINED, 3, False)]
)
def test_a_trainer_that_left_comes_again_when_its_policy_is_trained_again(
    recipe_with: Callable[..., Recipe], tmp_path: Path, why: str, steps: int, again: bool
) -> None:
    made, said = launcher(recipe_with(**two()), tmp_path)
    made._posts["trainer-main"].left = True
    made._staff("http://127.0.0.1:1", status(left(why), steps=steps))
    assert made._posts["trainer-main"].left is not again
    assert said == (["policy main is trained again"] if again else [])


def test_nobody_is_trained_where_the_recipe_has_no_steps(recipe_with: Callable[..., Recipe]) -> None:
    assert need_trainers(recipe_with(**two(), steps=0), status(added=ADDED)) == []


# ── a run that is over ──


def test_what_joined_is_known_from_the_run_s_file_and_such_a_run_is_not_replayed() -> None:
    db = RunDb(sqlite3.connect(":memory:"))
    db.connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value)")
    assert db.joined() == {}
    for each in ADDED:
        db.connection.execute(
            "INSERT INTO meta VALUES (?, ?)", (f"added/{each.name}", msgspec.json.encode(each).decode())
        )
    assert db.joined() == {"idle": "main", "late": "main", "mean": "main"}
    with pytest.raises(ConfigError, match="idle, late, mean joined this run while it went on"):
        read_record(db, None)
    db.connection.close()


# ── the command line ──


@pytest.mark.parametrize(("text", "found"), [("a", ("a", None)), ("a@0", ("a", 0)), ("a.b@17", ("a.b", 17))])
def test_a_source_is_a_policy_or_a_version_of_one(text: str, found: tuple[str, int | None]) -> None:
    assert split_source(text) == found


@pytest.mark.parametrize("text", ["", "@1", "a@", "a@x", "a@-1", "a@1@2", "a@" + "9" * 19])
def test_what_names_no_source_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--source must be POLICY or POLICY@VERSION"):
        split_source(text)


def test_weights_come_from_one_place(tmp_path: Path) -> None:
    wanted = SimpleNamespace(
        run=str(tmp_path), policy="p", source="a@1", role="r", model=tmp_path, frozen=False, decay=None, ca=None
    )
    with pytest.raises(ConfigError, match="give --source without a version"):
        asyncio.run(add_policy(wanted))


NOBODY = "this is for a run that goes on and can be asked: .* runs with --in-process, where nobody can ask it, or is"


@pytest.fixture
def in_process(tmp_path: Path) -> Path:
    """A run of which nobody listens anywhere."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "call", [("freeze", "p"), ("unfreeze", "p"), ("cast", "r", "p"), ("swap", "p", "--source", "q", "--version", "0")]
)
def test_a_run_that_nobody_can_ask_is_not_changed(
    in_process: Path, call: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *rest = call
    assert main([verb, str(in_process), *rest]) == 2
    assert re.search(NOBODY, capsys.readouterr().err)


def test_weights_are_not_stored_for_a_run_that_nobody_can_ask(in_process: Path, tmp_path: Path) -> None:
    folder = MODEL.build(tmp_path / "model")
    wanted = SimpleNamespace(
        run=str(in_process), policy="p", source="a", role="r", model=folder, frozen=False, decay=None, ca=None
    )
    with pytest.raises(ConfigError, match=NOBODY):
        asyncio.run(add_policy(wanted))
    assert not (in_process / "weights").exists()


# ── what is said of a run that somebody joined ──


def joins(store: Store, policy: str, like: str) -> None:
    store.run("INSERT OR IGNORE INTO policies (name, trainable) VALUES (?, 1)", (policy,))
    store.set(f"added/{policy}", msgspec.json.encode(AddedPolicy(name=policy, like=like)).decode())


def test_the_doctor_looks_at_who_joined_by_the_bound_of_whom_it_is_like(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", policies=("main",), max_staleness=3).groups(9).steps(20)
    joins(made.store, "late", "main")
    run = made.groups(9, policy="late").steps(5, policy="late").close()
    assert [(each.policy, each.max_staleness, each.steps) for each in symptoms_of(run)] == [
        ("late", 3, 5),
        ("main", 3, 20),
    ]


def test_what_it_said_is_read_by_the_tokenizer_of_whom_it_is_like(
    tmp_path: Path, recipe_with: Callable[..., Recipe]
) -> None:
    with Rig(make_spec(), folder=tmp_path) as rig:
        (lease,) = rig.leases(1)
        rig.submit(lease)
        joins(rig.service.ledger.store, "p", "main")
    recipe = recipe_with(policies={"main": Policy(model=MODEL)}, roles={"a": "main"})
    tokenizer = tokenizer_of(recipe, "main")
    assert tokenizer is not None
    given, sampled = (tokenizer.decode(ids, skip_special_tokens=False) for ids in ([0, 1], [2, 3]))
    journey = journey_of(RunFolder(tmp_path), lease.group, lease.index)
    assert list(text_lines(journey, recipe, colour=False))[-1] == f"{given}⟦{sampled}⟧[v0]"
    answers = iter([[(1,), (2,)], [(lease.group, lease.group)]])  # two evaluations; a group of each, of the same task
    connection = SimpleNamespace(execute=lambda *_: SimpleNamespace(fetchall=lambda: next(answers)))
    db = SimpleNamespace(connection=connection, joined=lambda: {"p": "main"}, episode=lambda *_: journey.episode)
    (pair,) = answer_pairs(db, RunFolder(tmp_path), recipe)  # type: ignore[arg-type]
    assert pair.before == pair.after
