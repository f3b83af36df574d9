"""What each role was rewarded with in evaluations, read from their episodes: each of several has its own accuracy."""

from __future__ import annotations

from pathlib import Path

from astraflow.observe.curve import Points
from astraflow.run.run_db import RunDb
from astraflow.types import Episode

Scored = list[dict[str, float]]
"""Of each episode: role → mean reward of its turns."""


def held_out_by_role(db: RunDb, payloads: Path) -> dict[str, Points]:
    """Role → (version, mean reward), of evaluations whose episodes are all still there; empty where one role plays.

    An episode that was lost counts as 0 for every role, as it does in the score; one in which a role was not rewarded
    does not count for that role.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for evaluation in db.evaluations():
        scored = _scored(db, payloads, evaluation.id)
        if scored is None:
            continue
        lost = evaluation.episodes - len(scored)
        for role in sorted({role for each in scored for role in each}):
            own = [each[role] for each in scored if role in each]
            found.setdefault(role, []).append((float(evaluation.version), sum(own) / (len(own) + lost)))
    return dict(found) if len(found) > 1 else {}


def _scored(db: RunDb, payloads: Path, evaluation: int) -> Scored | None:
    """Of the episodes that ended; None: some are pruned."""
    scored: Scored = []
    for group, index in db.connection.execute(
        "SELECT e.group_id, e.idx FROM episodes e JOIN groups g ON g.id = e.group_id "
        "WHERE g.eval_id = ? AND e.state = 'done' ORDER BY e.group_id, e.idx",
        (evaluation,),
    ).fetchall():
        episode = db.episode(group, index, payloads)
        if episode is None:
            return None
        scored.append(rewards_by_role(episode))
    return scored


def rewards_by_role(episode: Episode) -> dict[str, float]:
    """Role → mean reward of its turns; without roles that were not rewarded."""
    turns: dict[str, list[float]] = {}
    for each in episode.trajectories:
        turns.setdefault(each.role, []).extend(turn.reward for turn in each.turns if turn.reward is not None)
    return {role: sum(rewards) / len(rewards) for role, rewards in turns.items() if rewards}
