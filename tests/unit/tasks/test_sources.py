"""Sources in memory, from files, from functions and mixed."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from astraflow.errors import ConfigError
from astraflow.tasks.check import check
from astraflow.tasks.digest import key_fraction, task_digest
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.jsonl import JsonlTasks
from astraflow.tasks.lists import ListTasks
from astraflow.tasks.mixture import Mixture
from astraflow.tasks.order import permutation, uniform
from astraflow.types import Task


def source(count: int = 4, name: str = "rows") -> ListTasks:
    return ListTasks(name, [Task(key=f"{name}{i}") for i in range(count)])


def numbers(index: int) -> Task:
    draw = random.Random(f"numbers/{index}")
    values = draw.sample(range(10, 1000), 3)
    return Task(key=" ".join(map(str, values)), payload={"numbers": values})


# ── lists ──


def test_a_list():
    tasks = source()
    assert (tasks.name, tasks.size) == ("rows", 4)
    assert tasks.task(2) == Task(key="rows2", dataset="rows")
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"has tasks 0 to 3, asked for {index}"):
            tasks.task(index)
    assert check(tasks) == 4


def test_a_list_with_a_key_twice_or_nothing_is_refused():
    with pytest.raises(ConfigError, match="key 'a' of row 2 is also that of row 0"):
        ListTasks("rows", [Task(key=key) for key in "aba"])
    with pytest.raises(ConfigError, match="has no tasks"):
        ListTasks("rows", [])


def test_a_digest_changes_exactly_with_the_tasks():
    base = Task(key="k", payload={"a": 1, "b": [1, 2]}, features={"f": np.arange(3)})
    same = Task(key="k", payload={"b": [1, 2], "a": 1}, features={"f": np.arange(3)})
    assert task_digest(base) == task_digest(same)
    one, two = np.zeros(1), np.ones(1)
    assert task_digest(Task(key="k", features={"a": one, "b": two})) == task_digest(
        Task(key="k", features={"b": two, "a": one})
    )
    others = [
        Task(key="l", payload=base.payload, features=base.features),
        Task(key="k", payload={"a": 1, "b": [2, 1]}, features=base.features),
        Task(key="k", payload=base.payload, features={"f": np.arange(3.0)}),
        Task(key="k", payload=base.payload, features={"f": np.arange(3).reshape(1, 3)}),
        Task(key="k", payload=base.payload, features={"g": np.arange(3)}),
        Task(key="k", payload=base.payload, features=base.features, workflow="supervised"),
        Task(key="k", payload=base.payload, features=base.features, dataset="other"),
    ]
    assert len({task_digest(task) for task in [base, *others]}) == 8
    assert source(4).digest() == source(4).digest() != source(5).digest()


# ── files ──


def write(tmp_path, text: str | bytes):
    path = tmp_path / "maths.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file(tmp_path):
    path = write(tmp_path, '{"id": "a", "question": "1+1"}\r\n\n{"id": 7, "question": "2+2", "answer": null}\n')
    tasks = JsonlTasks(path, key="id", workflow="supervised")
    assert (tasks.name, tasks.size) == ("maths", 2)
    assert tasks.task(0) == Task(
        key="a", dataset="maths", payload={"id": "a", "question": "1+1"}, workflow="supervised"
    )
    assert tasks.task(1).key == "7"
    assert JsonlTasks(path, key="id", name="other").task(0).dataset == "other"
    assert check(tasks) == 2


def test_without_a_key_field_the_content_is_the_key(tmp_path):
    first = JsonlTasks(write(tmp_path, '{"q": 1, "a": 2}\n{"q": 3}\n'))
    second = JsonlTasks(write(tmp_path, '{"q": 3}\n{"a": 2, "q": 1}'))
    assert {first.task(0).key, first.task(1).key} == {second.task(0).key, second.task(1).key}
    assert first.task(0).key == second.task(1).key
    assert first.digest() != second.digest()
    with pytest.raises(ConfigError, match=r"maths.jsonl:2 has the key .* of line 1.*remove one of the equal rows"):
        JsonlTasks(write(tmp_path, '{"q": 1}\n{"q": 1}\n'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"q": 1}\n{"q": \n', r"maths.jsonl:2 is not JSON \(.*\); fix or remove the line, one JSON object a line"),
        ("q: 1\n", "maths.jsonl:1 is not JSON"),
        ('{"q": NaN}', "maths.jsonl:1 is not JSON"),
        (b'{"q": "\xff\xfe"}', "maths.jsonl:1 is not JSON"),
        ("[1, 2]\n", "maths.jsonl:1 holds a JSON list; write one JSON object a line"),
        ("\n\n", "has no rows; write one JSON object a line"),
        ("", "has no rows"),
        ('{"q": 123456789012345678901234567890}', "maths.jsonl:1 (holds an integer beyond 64 bits|is not JSON)"),
    ],
)
def test_a_bad_line_names_file_line_and_what_to_do(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        JsonlTasks(write(tmp_path, text))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"q": 1}', "maths.jsonl:1 needs a string or an integer in 'id', its key, found None"),
        ('{"id": ""}', "found ''"),
        ('{"id": true}', "found True"),
        ('{"id": 1.5}', "found 1.5"),
        ('{"id": 1}\n{"id": "1"}', "maths.jsonl:2 has the key '1' of line 1; keys must be unique: change one of them"),
    ],
)
def test_a_bad_key(tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        JsonlTasks(write(tmp_path, row), key="id")


def test_f3_a_row_without_its_answer_is_refused_when_it_is_loaded(tmp_path):
    path = write(tmp_path, '{"question": "1+1", "answer": null}\n')
    with pytest.raises(ConfigError, match=r"maths.jsonl:1 lacks 'answer'; it has 'question', 'answer'"):
        JsonlTasks(path, require=("question", "answer"))


def test_a_missing_file_and_a_byte_order_mark(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read tasks from .*nowhere.jsonl: No such file"):
        JsonlTasks(tmp_path / "nowhere.jsonl")
    assert JsonlTasks(write(tmp_path, b'\xef\xbb\xbf{"q": 1}')).size == 1


def test_the_file_may_change_later_the_tasks_do_not(tmp_path):
    path = write(tmp_path, '{"q": 1}\n')
    tasks = JsonlTasks(path)
    before = tasks.digest()
    path.write_text('{"q": 2}\n')
    assert tasks.task(0).payload == {"q": 1}
    assert JsonlTasks(path).digest() != before == tasks.digest()


# ── functions ──


def test_generated_tasks():
    tasks = GeneratedTasks("numbers", numbers)
    assert (tasks.name, tasks.size, tasks.task(5).dataset) == ("numbers", None, "numbers")
    assert tasks.task(1 << 50) == tasks.task(1 << 50)
    with pytest.raises(IndexError):
        tasks.task(-1)
    sized = GeneratedTasks("numbers", numbers, size=3)
    assert sized.size == 3
    with pytest.raises(IndexError):
        sized.task(3)
    assert tasks.digest() == GeneratedTasks("numbers", numbers).digest() != sized.digest()
    assert tasks.digest() != GeneratedTasks("numbers", lambda index: numbers(index + 1)).digest()


def test_a_generator_that_is_not_a_function_of_its_index_is_refused():
    counter = iter(range(1000))
    with pytest.raises(ConfigError, match="two different tasks for one index"):
        GeneratedTasks("x", lambda index: Task(key=str(next(counter))))
    with pytest.raises(ConfigError, match=r"make\(0\) must give a Task, found dict"):
        GeneratedTasks("x", lambda index: {})
    with pytest.raises(ConfigError, match="size must be at least 1"):
        GeneratedTasks("x", numbers, size=0)


# ── mixtures ──


def test_a_mixture_keeps_its_proportions_and_goes_through_every_row():
    mixed = Mixture("all", [(source(6, "a"), 3), (source(4, "b"), 1)])
    assert (mixed.name, mixed.size) == ("all", None)
    keys = [mixed.task(index).key for index in range(16)]
    for cycle in range(4):
        assert Counter(key[0] for key in keys[cycle * 4 : cycle * 4 + 4]) == {"a": 3, "b": 1}
    of_a = [key for key in keys if key[0] == "a"]
    assert sorted(of_a[:6]) == sorted(of_a[6:]) == [f"a{i}" for i in range(6)]
    assert of_a[:6] != of_a[6:], "another order each time round"
    assert sorted(key for key in keys if key[0] == "b") == [f"b{i}" for i in range(4)]


def test_a_mixture_has_random_access():
    parts = [(source(6, "a"), 3), (GeneratedTasks("n", numbers), 2)]
    straight = [Mixture("all", parts).task(index) for index in range(60)]
    mixed = Mixture("all", parts)
    for index in (59, 0, 31, 7, 58, 31):
        assert mixed.task(index) == straight[index]
    assert Mixture("all", parts, seed=1).digest() != mixed.digest() == Mixture("all", parts).digest()
    with pytest.raises(IndexError):
        mixed.task(-1)


@pytest.mark.parametrize("weights", [[], [0], [1, -1]])
def test_a_mixture_needs_whole_weights(weights):
    with pytest.raises(ConfigError, match="weights must be integers of at least 1"):
        Mixture("all", [(source(), weight) for weight in weights])


# ── check ──


class Odd:
    name = "odd"

    def __init__(self, keys, size="all"):
        self.keys = keys
        self.size = len(keys) if size == "all" else size
        self.calls = 0

    def task(self, index):
        self.calls += 1
        key = self.keys[index % len(self.keys)]
        return Task(key=key, payload={"calls": self.calls} if key == "moody" else {})

    def digest(self):
        return "d"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a", "b", "a"], "key 'a' of row 2 is also that of row 0; make keys unique"),
        (["a", ""], "row 1 has an empty key"),
        (["a", "moody"], "task 1 changes from call to call"),
        ([], "has no tasks"),
    ],
)
def test_check_names_the_rows(keys, message):
    with pytest.raises(ConfigError, match=message):
        check(Odd(keys))


def test_check_looks_at_a_part_of_an_unbounded_source():
    assert check(GeneratedTasks("numbers", numbers)) == 200
    with pytest.raises(ConfigError, match="key 'a' of row 2"):
        check(Odd(["a", "b"], size=None))


# ── order ──


def test_orders_are_pinned():
    """Raw bits only: numpy may change what its Generator makes of a seed, not these."""
    assert permutation(8, seed=(0, 0)).tolist() == PINNED_ORDER
    assert uniform(seed=(1, 2, 3)) == PINNED_UNIFORM
    assert key_fraction("task") == PINNED_FRACTION
    assert key_fraction("task", salt="x") != PINNED_FRACTION
    assert sorted(permutation(1000, seed=(3,)).tolist()) == list(range(1000))


PINNED_ORDER = [3, 2, 1, 6, 0, 7, 4, 5]
PINNED_UNIFORM = 0.6704722626516632
PINNED_FRACTION = 0.11784092302603422
