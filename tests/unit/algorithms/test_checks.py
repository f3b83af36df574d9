"""Options that an algorithm cannot mean are refused when it is made, by name and with what was found."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from astraflow.algorithms.checks import MOST_EPISODES, check_at_least
from astraflow.algorithms.credit import GroupMean, PerTask, Whitened
from astraflow.algorithms.credit_agents import StateGroups
from astraflow.algorithms.credit_shapes import AtTheEnd, Shaped, ShorterIsBetter, Team, TurnDiscount
from astraflow.algorithms.curate import (
    Dots,
    FilterSolved,
    Greso,
    Less,
    Mixture,
    Prioritised,
    Shuffled,
    Stage,
    Stages,
    Uniform,
    WithOlderVersions,
)
from astraflow.algorithms.keep_content import DropDuplicates, DropOverlong, MeanReward, MinCompleted
from astraflow.algorithms.keep_subset import MaxVariance, OfSubset
from astraflow.algorithms.pace import BoundedStaleness
from astraflow.algorithms.pace_held import HeldStaleness
from astraflow.algorithms.select import EarliestDeadline, Fifo
from astraflow.algorithms.select_mix import WithSupervised
from astraflow.algorithms.select_replay import WithReplay
from astraflow.errors import ConfigError
from tests.unit.algorithms.curate_build import source

NAN, INF = float("nan"), float("inf")
WHOLE = "must be a whole number"
THE_CLASS = "must be a Credit, found GroupMean (the class, not an object)"


def uniform() -> Uniform:
    return Uniform(source(), group_size=4)


def less(**options: Any) -> Less:
    rows = source(features={"gradient": np.ones(2)})
    return Less(rows, held_out=rows, group_size=4, fraction=options.pop("fraction", 1.0), **options)


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: MaxVariance(keep=2.5), f"MaxVariance.keep {WHOLE}, found 2.5"),
    (lambda: OfSubset(subset=None, credit=GroupMean()), "OfSubset.subset must be a MaxVariance, found NoneType"),
    (lambda: OfSubset(subset=MaxVariance(keep=2), credit=None), "OfSubset.credit must be a Credit, found NoneType"),
    (lambda: Whitened(credit=GroupMean), f"Whitened.credit {THE_CLASS}"),
    (lambda: Whitened(credit=None), "Whitened.credit must be a Credit, found NoneType"),
    (lambda: PerTask(credit=None), "PerTask.credit must be a Credit, found NoneType"),
    (lambda: PerTask(credit=GroupMean), f"PerTask.credit {THE_CLASS}"),
    (lambda: Shaped(shapes=(AtTheEnd(),), credit=None), "Shaped.credit must be a Credit, found NoneType"),
    (lambda: Shaped(shapes=AtTheEnd(), credit=GroupMean()), "Shaped.shapes must be a list of shapes, found AtTheEnd"),
    (lambda: ShorterIsBetter(passing=NAN), "ShorterIsBetter.passing must be finite, found nan"),
    (lambda: ShorterIsBetter(passing=10**400), "ShorterIsBetter.passing must be finite, found 1000"),
    (lambda: ShorterIsBetter(weight="1"), "ShorterIsBetter.weight must be in [0, inf), found 1"),
    (lambda: TurnDiscount(gamma=None), "TurnDiscount.gamma must be in [0, 1], found None"),
    (lambda: Team(share="all"), "Team.share must be in [0, 1], found 'all'"),
    (lambda: StateGroups(omega=None), "StateGroups.omega must be in [0, inf), found None"),
    (lambda: WithReplay(None, ratio=0.5), "WithReplay.select must be a Select, found NoneType"),
    (lambda: WithReplay(Fifo(), ratio=0.5, replays=1.5), f"WithReplay.replays {WHOLE} or None (until too old), fou"),
    (lambda: WithReplay(Fifo(), ratio=0.5, seed=None), f"WithReplay.seed {WHOLE}, found None"),
    (lambda: WithReplay(Fifo(), ratio=0.5, decay="a"), "WithReplay.decay must be in (0, 1], found a"),
    (lambda: WithSupervised(None, share=0.5), "WithSupervised.select must be a Select, found NoneType"),
    (lambda: EarliestDeadline(window=1.5), f"window {WHOLE} or None (no window), found 1.5"),
    (lambda: Fifo(window=True), f"window {WHOLE} or None (no window), found True"),
    (lambda: BoundedStaleness(ahead=0.5), f"ahead {WHOLE} or None (max_staleness), found 0.5"),
    (lambda: HeldStaleness(lag=None), f"HeldStaleness.lag {WHOLE}, found None"),
    (lambda: DropOverlong(tokens=1.5), f"DropOverlong.tokens {WHOLE}, found 1.5"),
    (lambda: DropDuplicates(copies="2"), f"DropDuplicates.copies {WHOLE}, found '2'"),
    (lambda: MinCompleted(share=None), "MinCompleted.share must be in [0, 1], found None"),
    (lambda: MeanReward(low="0"), "MeanReward: low <= high, found low 0"),
    (lambda: Greso(source(), group_size=2.5), f"Greso.group_size {WHOLE}, found 2.5"),
    (lambda: Greso(source(), group_size=4, seed=1.5), f"Greso.seed {WHOLE}, found 1.5"),
    (lambda: Greso(source(), group_size=4, seed=None), f"Greso.seed {WHOLE}, found None"),
    (lambda: Greso(source(), group_size=4, reward_range=1), "Greso.reward_range must be (low, high), both finite and"),
    (lambda: Greso(source(), group_size=4, reward_range=(0, "1")), "Greso.reward_range must be (low, high)"),
    (lambda: Greso(None, group_size=4), "Greso.tasks must be a TaskSource, found NoneType"),
    (lambda: Shuffled(None, group_size=4), "Shuffled.tasks must be a TaskSource, found NoneType"),
    (lambda: Shuffled(source(), group_size=4, epochs=1.5), f"Shuffled.epochs {WHOLE} or None (for ever), found 1.5"),
    (lambda: Dots(source(), group_size=4, references=1.5), f"Dots.references {WHOLE}, found 1.5"),
    (lambda: Dots(source(), group_size=4, rest=1.5), f"Dots.rest {WHOLE}, found 1.5"),
    (lambda: Dots(source(), group_size=4, tau="a"), "Dots.tau must be in (0, inf), found 'a'"),
    (lambda: FilterSolved(source(), group_size=4, rounds=1.5), f"FilterSolved.rounds {WHOLE}, found 1.5"),
    (lambda: FilterSolved(source(), group_size=4, solved_at=None), "FilterSolved.solved_at must be in (0, 1], found N"),
    (lambda: Prioritised(source(), group_size=4, memory="a"), "Prioritised.memory must be in [0, 1), found 'a'"),
    (lambda: Stage(curate=uniform(), groups=1.5), f"Stage.groups {WHOLE} or None (until it has no more tasks), found"),
    (lambda: Stage(curate=None), "Stage.curate must be a Curate, found NoneType"),
    (lambda: Stages([uniform()]), "Stages[0] must be a Stage, found Uniform"),
    (lambda: Stages(uniform()), "Stages needs a list of at least one stage, found <astraflow"),
    (lambda: Mixture([None], weights=[1]), "Mixture.parts[0] must be a Curate, found NoneType"),
    (lambda: Mixture([uniform()], weights=["a"]), "Mixture.weights must be finite and above 0, found ['a']"),
    (lambda: Mixture([uniform()], weights=[1], seed=1.5), f"Mixture.seed {WHOLE}, found 1.5"),
    (lambda: WithOlderVersions(None, chance=0.1), "WithOlderVersions.curate must be a Curate, found NoneType"),
    (lambda: WithOlderVersions(uniform(), chance="a"), "WithOlderVersions.chance must be in [0, 1], found 'a'"),
    (
        lambda: less(rates=["a"]),
        "Less.rates must be 1 finite numbers of at least 0, one a checkpoint and not all 0, fo",
    ),
    (
        lambda: less(rates=3),
        "Less.rates must be 1 finite numbers of at least 0, one a checkpoint and not all 0, found 3",
    ),
    (lambda: less(fraction=None), "Less.fraction must be in (0, 1], found None"),
    (lambda: Less(None, held_out=source(), group_size=4), "Less.tasks must be a TaskSource, found NoneType"),
]


@pytest.mark.parametrize(("make", "message"), CASES, ids=[message for _, message in CASES])
def test_an_option_that_cannot_be_meant_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("kind", [Shuffled, Uniform, Greso, Dots, FilterSolved, Prioritised])
def test_a_group_has_no_more_episodes_than_a_ledger_should_hold(kind: Any) -> None:
    assert kind(source(), group_size=MOST_EPISODES).next().episodes == MOST_EPISODES
    with pytest.raises(ConfigError, match=f"{kind.__name__}.group_size must be at most 65536 episodes, found 65537"):
        kind(source(), group_size=MOST_EPISODES + 1)


def test_numbers_of_numpy_are_numbers() -> None:
    check_at_least("n", np.int64(3), 3)
    assert MinCompleted(share=np.float32(0.5)).share == 0.5
