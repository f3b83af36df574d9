"""Features beside the tasks of a source: made, hashed from text, or read from a file."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from astraflow.algorithms.curate import Dots, Less
from astraflow.errors import ConfigError
from astraflow.tasks.check import check
from astraflow.tasks.features import WithFeatures, hashed, stored_features, text_features
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task

TEXTS = ("add two and three", "add two and four", "translate into French")
TASKS = ListTasks("rows", [Task(key=str(i), payload={"question": text}) for i, text in enumerate(TEXTS)])


def similarity(a: str, b: str) -> float:
    return float(hashed(a, size=256, grams=3) @ hashed(b, size=256, grams=3))


def test_texts_that_share_words_are_similar():
    assert similarity(TEXTS[0], TEXTS[0]) == pytest.approx(1.0)
    assert similarity(TEXTS[0], TEXTS[1]) > 0.6 > 0.3 > abs(similarity(TEXTS[0], TEXTS[2]))
    assert similarity("ADD two", "add TWO") == pytest.approx(1.0)
    assert not hashed("", size=8, grams=3).any()
    assert hashed("a", size=8, grams=9).any(), "shorter than a gram"


def test_hashes_are_pinned():
    """Features must not change from version to version: states and choices go by them."""
    assert np.flatnonzero(hashed("ab", size=16, grams=3)).tolist() == PINNED


PINNED = [9, 10]


def test_a_source_with_features_is_a_task_source():
    source = WithFeatures(TASKS, "x", text_features("question", size=32))
    assert check(source) == 3
    assert (source.name, source.size) == ("rows", 3)
    assert source.task(1).features["x"].shape == (32,)
    assert source.task(1).payload == TASKS.task(1).payload
    assert source.digest() != TASKS.digest()
    assert source.digest() != WithFeatures(TASKS, "x", text_features("question", size=16)).digest()
    assert source.digest() == WithFeatures(TASKS, "x", text_features("question", size=32)).digest()
    both = WithFeatures(source, "y", lambda task: np.ones(1))
    assert sorted(both.task(0).features) == ["x", "y"]
    with pytest.raises(IndexError, match="has tasks 0 to 2, asked for 3"):
        source.task(3)


def test_dots_goes_by_them():
    curate = Dots(WithFeatures(TASKS, "x", text_features("question")), group_size=2, feature="x")
    assert curate.next().task.key in "012"


def test_an_unbounded_source_may_have_features_too():
    unbounded = GeneratedTasks("n", lambda index: Task(key=str(index)))
    source = WithFeatures(unbounded, "x", lambda task: np.array([len(task.key)]))
    assert source.size is None and source.task(1000).features["x"].tolist() == [4]


def test_features_that_change_or_are_none_are_refused():
    random = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"feature 'x' of 'rows': make\(task\) gave two different answers"):
        WithFeatures(TASKS, "x", lambda task: random.normal(size=2))
    for value, message in (([1, 2], "must be an array of numbers"), (np.array([np.inf]), "not finite")):
        with pytest.raises(ConfigError, match=f"feature 'x' of task '0' {message}|feature 'x' of task '0' holds what"):
            WithFeatures(TASKS, "x", lambda task, value=value: value)
    with pytest.raises(ConfigError, match="task '0' has no text in 'answer'; it has question"):
        WithFeatures(TASKS, "x", text_features("answer"))
    with pytest.raises(ConfigError, match="size and grams must be at least 1"):
        text_features("question", size=0)


def test_features_from_a_file(tmp_path):
    path = tmp_path / "gradients.safetensors"
    save_file({str(i): np.eye(3, dtype=np.float32)[i] for i in range(3)}, path)
    source = WithFeatures(TASKS, "gradient", stored_features(path))
    goal = ListTasks("goal", [Task(key="g", features={"gradient": np.array([0.0, 1.0, 0.0])})])
    curate = Less(source, held_out=goal, group_size=2, fraction=0.3)
    assert curate.next().task.key == "1"
    more = ListTasks("rows", [Task(key="9")])
    with pytest.raises(ConfigError, match="has no feature of task '9'; it has those of 3 other tasks"):
        WithFeatures(more, "gradient", stored_features(path))
    (tmp_path / "broken").write_bytes(b"{}")
    for name in ("broken", "nowhere"):
        with pytest.raises(ConfigError, match=f"cannot read features from .*{name}"):
            stored_features(tmp_path / name)
