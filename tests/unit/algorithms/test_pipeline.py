"""The composition, and the kit that every algorithm must pass, tried on broken ones too."""

from __future__ import annotations

import numpy as np
import pytest

from astraflow.algorithms.base import Admission
from astraflow.algorithms.credit import GroupMean, PerTask, Returns, Whitened
from astraflow.algorithms.credit_shapes import Shaped, TurnDiscount
from astraflow.algorithms.curate import Greso, Mixture, OverSampled, Shuffled, Stage, Stages
from astraflow.algorithms.keep import DropTruncated, DropZeroVariance
from astraflow.algorithms.keep_subset import MaxVariance, OfSubset
from astraflow.algorithms.pace import AllHaveRoom, BoundedStaleness
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.errors import ConfigError
from astraflow.tasks.lists import ListTasks
from astraflow.testing.check_algorithm import check_algorithm, unit_table
from astraflow.types import Task
from tests.unit.dataflow_pure.build import pipeline

TASKS = ListTasks("rows", [Task(key=str(i)) for i in range(5)])


def shuffled(**more) -> Shuffled:
    return Shuffled(TASKS, group_size=4, **more)


SHIPPED = {
    "GroupMean": GroupMean,
    "GroupMean mean only": lambda: GroupMean(std=False),
    "GroupMean leave one out": lambda: GroupMean(std=False, leave_one_out=True),
    "Returns": Returns,
    "Whitened": lambda: Whitened(credit=GroupMean()),
    "DropZeroVariance": DropZeroVariance,
    "DropTruncated": DropTruncated,
    "EarliestDeadline": EarliestDeadline,
    "EarliestDeadline windowed": lambda: EarliestDeadline(window=4),
    "Fifo": Fifo,
    "BoundedStaleness": BoundedStaleness,
    "AllHaveRoom": AllHaveRoom,
    "Shuffled": shuffled,
    "Shuffled twice": lambda: shuffled(epochs=2),
    "Stages": lambda: Stages([Stage(curate=shuffled(), groups=3), Stage(curate=shuffled(seed=2))]),
    "Mixture": lambda: Mixture([shuffled(epochs=1), shuffled(seed=5)], weights=[1, 2]),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_algorithm_passes_the_kit(name):
    check_algorithm(SHIPPED[name])


class Forgetful:
    """Does not write its position down."""

    def __init__(self):
        self.position = 0

    def next(self):
        self.position += 1
        return Admission(task=Task(key=str(self.position)), episodes=1)

    def observe(self, summary):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Unseeded(Forgetful):
    """Two of them differ."""

    made = 0

    def __init__(self):
        Unseeded.made += 1
        self.position = Unseeded.made * 100


class WideState(Forgetful):
    """A generator's 128 bits do not fit into msgpack."""

    def state_dict(self):
        return {"position": np.random.default_rng(0).bit_generator.state["state"]["state"]}


class Objects(Forgetful):
    def state_dict(self):
        return {"position": {1, 2}}


class Meddling(Returns):
    """Writes into its argument."""

    def group(self, units):
        units.reward[:] = 0
        return super().group(units)


class Wide(Returns):
    def group(self, units):
        return np.zeros(len(units))


class Leaky(Returns):
    """A unit that does not count gets an advantage."""

    def group(self, units):
        return np.ones(len(units), np.float32)


class Chatty:
    def verdict(self, summary, advantages):
        return "Because I say so!"


class Greedy:
    def pick(self, ready, *, need, oldest_open):
        return [group.group for group in ready]


class Shut:
    def may_admit(self, rooms):
        return False


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Forgetful, "after a resume at round 1 the choices differ"),
        (Unseeded, "two equal objects differ"),
        (WideState, "beyond 64 bits"),
        (Objects, "only msgpack types and arrays"),
        (Meddling, "the unit table was changed"),
        (Wide, "must be float32"),
        (Leaky, "does not count got an advantage"),
        (Chatty, "a reason is a metric's name"),
        (Greedy, "exactly need=1"),
        (Shut, "let the first group of a run in"),
        (object, "answers none of the five questions"),
    ],
)
def test_the_kit_catches(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_algorithm(broken)


def test_f70_pipeline_state_round_trip():
    first = pipeline(curate=shuffled(), keep=(DropZeroVariance(),))
    head = [first.curate.next() for _ in range(7)]
    second = pipeline(curate=shuffled(), keep=(DropZeroVariance(),))
    second.load_state_dict(first.state_dict())
    assert first.state_dict().keys() == {"curate"}, "only what has a state is written"
    assert [first.curate.next() for _ in range(7)] == [second.curate.next() for _ in range(7)]
    assert head[0] is not None


def test_state_of_another_composition_is_refused():
    class Stateful(DropZeroVariance):
        def state_dict(self):
            return {"seen": 1}

        def load_state_dict(self, state):
            pass

    state = pipeline(keep=(DropTruncated(), Stateful())).state_dict()
    assert state["keep.1"] == {"seen": 1}
    with pytest.raises(ConfigError, match=r"pipeline state is of \['curate', 'keep.1'\], this recipe has \['curate'\]"):
        pipeline().load_state_dict(state)


ANOTHER = (
    "it was written by another version of this program or of the algorithm: go on with that one, or start a new run"
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("position"), "cannot read what is stored of it: it lacks 'position'"),
        (lambda state: state.update(position="x"), "cannot read what is stored of it: ValueError: invalid literal"),
        (lambda state: state.update(position=None), "cannot read what is stored of it: TypeError: int"),
        (lambda state: state.update(shuffles={"a": 1}), "does not know what is stored of it as shuffles"),
    ],
)
def test_a_state_of_another_version_says_whose_it_is_and_what_to_do(change, words):
    made = pipeline(curate=shuffled())
    state = made.state_dict()
    change(state["curate"])
    with pytest.raises(ConfigError, match=f"^curate \\(Shuffled\\) {words}.*; {ANOTHER}$"):
        made.load_state_dict(state)


def test_an_algorithm_may_forget_what_is_gone():
    """What a field holds is its own affair."""

    class Counts:
        def __init__(self):
            self.seen = {}

        def verdict(self, group, advantages):
            return None

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = {task: n for task, n in state["seen"].items() if task != "gone"}

    made = pipeline(keep=(Counts(),))
    made.load_state_dict({**made.state_dict(), "keep.0": {"seen": {"gone": 1, "here": 2}}})
    assert made.state_dict()["keep.0"] == {"seen": {"here": 2}}


def test_what_learns_is_read_again_with_or_without_what_it_has_learnt():
    """After other tasks were accepted ``learned`` is empty: fields that are added are no fault."""
    for learned in (None, {}):
        made = pipeline(curate=Greso(TASKS, group_size=4))
        state = made.state_dict()
        if learned is not None:
            state["curate"]["learned"] = learned
        made.load_state_dict(state)


class Counting(Returns):
    """A Credit with a state: how many groups it has credited."""

    def __init__(self, seen=0):
        object.__setattr__(self, "seen", seen)

    def group(self, units):
        object.__setattr__(self, "seen", self.seen + 1)
        return super().group(units)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        object.__setattr__(self, "seen", state["seen"])


class Shape:
    """A stateful one."""

    seen = 0

    def __call__(self, units):
        self.seen += 1
        return units

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Plain:
    """A wrapper that is no dataclass and knows of no state."""

    def __init__(self, credit):
        self._credit = credit

    def group(self, units):
        return self._credit.group(units)

    def batch(self, units, advantages):
        return self._credit.batch(units, advantages)


WRAPPED = {
    "credit": lambda inner: inner,
    "credit.credit": lambda inner: Whitened(credit=inner),
    "credit.credit.credit": lambda inner: PerTask(credit=Whitened(credit=inner)),
    "credit._credit": Plain,
    "credit._credit.credit": lambda inner: Plain(OfSubset(subset=MaxVariance(keep=2), credit=inner)),
}


@pytest.mark.parametrize("place", WRAPPED)
def test_f70_a_stateful_credit_keeps_its_state_inside_wrappers(place):
    def made():
        return pipeline(credit=WRAPPED[place](Counting()))

    first, second = made(), made()
    for seed in range(3):
        first.credit.group(unit_table(seed))
    state = first.state_dict()
    assert state[place] == {"seen": 3}
    second.load_state_dict(state)
    assert second.state_dict() == state
    with pytest.raises(ConfigError, match="this recipe has"):
        pipeline(credit=GroupMean()).load_state_dict(state)


def test_f70_stateful_shapes_and_what_stands_in_two_places_are_named_once():
    shape = Shape()
    curate = Greso(ListTasks("t", [Task(key="a"), Task(key="b")]), group_size=2)
    credit = Shaped(shapes=(TurnDiscount(gamma=0.9), shape), credit=Counting())
    made = pipeline(curate=curate, pace=OverSampled(curate=curate), credit=credit)
    made.credit.group(unit_table(1))
    state = made.state_dict()
    assert state.keys() == {"curate", "credit.shapes.1", "credit.credit"}
    assert state["credit.shapes.1"] == {"seen": 1}


@pytest.mark.parametrize("place", ["curate", "pace", "credit", "select"])
def test_a_part_that_answers_another_question_is_refused(place):
    with pytest.raises(ConfigError, match=f"Pipeline.{place} must be a {place.title()}, found DropZeroVariance"):
        pipeline(**{place: DropZeroVariance()})


def test_a_class_instead_of_an_object_is_refused():
    with pytest.raises(ConfigError, match=r"Pipeline.credit must be a Credit, found GroupMean \(the class"):
        pipeline(credit=GroupMean)
    with pytest.raises(ConfigError, match=r"Pipeline.keep\[1\] must be a Keep, found GroupMean"):
        pipeline(keep=[DropTruncated(), GroupMean()])
    with pytest.raises(ConfigError, match=r"Pipeline.keep must be a list of Keep objects, found DropTruncated"):
        pipeline(keep=DropTruncated())
