"""A held-out key is never trained, whatever is restarted, reordered or added."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import ConfigError
from astraflow.tasks.check import check
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.held_out import held_out
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task


def rows(count: int = 50) -> ListTasks:
    return ListTasks("rows", [Task(key=f"row {i}", payload={"i": i}) for i in range(count)])


def numbers(index: int) -> Task:
    """Few different keys, so that training and held-out would often meet."""
    draw = random.Random(f"numbers/{index}")
    return Task(key=str(draw.randrange(2000)))


def keys(source, count: int | None = None) -> list[str]:
    return [source.task(index).key for index in range(source.size if count is None else count)]


@given(count=st.integers(1, 49), salt=st.sampled_from(["", "a", "b"]))
def test_a_sized_source_is_split_exactly(count, salt):
    train, held = held_out(rows(), count=count, salt=salt)
    assert len(keys(held)) == held.size == count
    assert sorted(keys(train) + keys(held)) == sorted(keys(rows()))
    assert not set(keys(train)) & set(keys(held))


@given(order=st.permutations(range(20)))
def test_the_order_of_rows_does_not_matter(order):
    straight = ListTasks("rows", [Task(key=str(i)) for i in range(20)])
    mixed = ListTasks("rows", [Task(key=str(i)) for i in order])
    assert set(keys(held_out(straight, count=5).held_out)) == set(keys(held_out(mixed, count=5).held_out))


def test_who_is_held_out_is_decided_by_the_hash_and_its_salt():
    chosen = {tuple(sorted(keys(held_out(rows(), count=5, salt=salt).held_out))) for salt in ("", "a", "b")}
    assert len(chosen) == 3


def test_an_unbounded_source_never_trains_a_held_out_key():
    train, held = held_out(GeneratedTasks("numbers", numbers), count=50)
    assert (train.size, held.size) == (None, 50)
    assert len(set(keys(held))) == 50, "different tasks"
    assert not set(keys(train, 5000)) & set(keys(held))
    assert check(held) == 50


def test_an_unbounded_training_side_has_random_access_and_keeps_free_tasks_in_place():
    source = GeneratedTasks("numbers", numbers)
    train = held_out(source, count=50).train
    straight = keys(train, 300)
    assert [train.task(index).key for index in (299, 3, 120)] == [straight[299], straight[3], straight[120]]
    moved = [index for index in range(300) if source.task(index).key != straight[index]]
    assert 0 < len(moved) < 45, "only those that are held out are replaced: 5 %"


def test_names_and_digests():
    train, held = held_out(rows(), count=5)
    assert (train.name, held.name) == ("rows", "rows/held_out")
    digests = {train.digest(), held.digest(), rows().digest()}
    digests |= {each.digest() for each in held_out(rows(), count=6)}
    digests |= {each.digest() for each in held_out(rows(), count=5, salt="x")}
    digests |= {each.digest() for each in held_out(rows(51), count=5)}
    assert len(digests) == 9
    again = held_out(rows(), count=5)
    assert (again.train.digest(), again.held_out.digest()) == (train.digest(), held.digest())
    assert train.task(0).dataset == "rows"
    with pytest.raises(IndexError):
        held.task(5)
    endless = held_out(GeneratedTasks("numbers", numbers), count=5)
    assert (endless.train.name, endless.held_out.name) == ("numbers", "numbers/held_out")
    assert endless.train.digest() != endless.held_out.digest()


def test_f70_the_split_depends_on_no_hash_seed():
    script = (
        "from tests.unit.tasks.test_held_out import *\n"
        "train, held = held_out(rows(), count=5)\n"
        "endless = held_out(GeneratedTasks('numbers', numbers), count=5)\n"
        "print(train.digest(), endless.train.digest(), '|'.join(keys(held) + keys(endless.held_out)))"
    )
    answers = set()
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        root = Path(__file__).parents[3]
        out = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        answers.add(out.stdout)
    assert len(answers) == 1


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match="count must be at least 1, found 0"):
        held_out(rows(), count=0)
    with pytest.raises(ConfigError, match="50 of 50 tasks of 'rows' leave none to train on"):
        held_out(rows(), count=50)
    endless = GeneratedTasks("numbers", numbers)
    with pytest.raises(ConfigError, match=r"fraction must be in \(0, 1\), found 1"):
        held_out(endless, count=5, fraction=1)
    with pytest.raises(ConfigError, match=r"only .* different keys .* raise fraction or lower count"):
        held_out(endless, count=200, fraction=0.05)


def test_a_source_of_held_out_keys_only_is_named():
    lonely = GeneratedTasks("lonely", lambda index: Task(key="a"))
    train, _ = held_out(lonely, count=1, fraction=0.999)
    with pytest.raises(ConfigError, match="'lonely': 64 tasks in a row from index 0 are held out"):
        train.task(0)
