"""Why a policy has no batch, in one sentence: what its groups lack, who serves it, what is wrong with the others.

    no batch for policy solver since 14:02:11: no worker served it for 600 s; 3/8 groups kept, 0 open; 0 workers serve
    it; b2 quarantined: digest mismatch at v14

Reads only. ``astraflow status`` shows the part after the cause at any time.
"""

from __future__ import annotations

from math import isclose

from astraflow.dataflow.components import ROLLOUT, ComponentRow
from astraflow.dataflow.ledger import Ledger
from astraflow.observe.waits import QUARANTINED

RECENT_S = 60.0
"""Who died so long ago while others serve is no cause of anything that lasts."""
MOST_GONE = 4
"""Named where nobody serves, those that went last."""


def no_batch(ledger: Ledger, policy: str, cause: str) -> str:
    """What stays true of a diagnosis; ``lacks`` is the rest of it, which is of the moment."""
    return f"no batch for policy {policy} since {ledger.time_text(waits_since(ledger, policy))}: {cause}"


def waits_since(ledger: Ledger, policy: str) -> float:
    """When its last batch ended; before the first one, when the run began to work."""
    row = ledger.store.one("SELECT MAX(ended_at) FROM batches WHERE policy = ?", policy)
    if row is not None and row[0] is not None:
        return float(row[0])
    return float(ledger.store.get("first_lease_at") or 0.0)


def lacks(ledger: Ledger, now: float, policy: str) -> str:
    """What the next batch still waits for."""
    room = ledger.groups.rooms()[policy]
    fresh = room.groups_per_batch - room.replayed_groups
    parts = [f"{room.kept_groups}/{fresh} groups kept, {room.open_groups} open"]
    if room.replayed_groups:
        parts.append(f"{room.replayed_groups} come again")
    row = ledger.store.one(
        # Told which index, lest it reads the run from its first episode on: the leased ones are at the end.
        "SELECT worker, leased_at, attempt, group_id, idx FROM episodes INDEXED BY episodes_leased "
        "WHERE state = 'leased' AND lane = 0 ORDER BY group_id, idx LIMIT 1"
    )
    if row is not None:
        parts.append(f"oldest episode {row[3]}/{row[4]} {now - row[1]:.0f} s on {row[0]} (attempt {row[2]})")
    return "; ".join([*parts, *filter(None, [workers_words(ledger, now)])])


def workers_words(ledger: Ledger, now: float) -> str:
    """What is wrong with whom; nothing, where every worker serves."""
    workers = [each for each in ledger.components.all() if each.component == ROLLOUT]
    here = [(each, _trouble(ledger, now, each)) for each in workers if each.state == "alive"]
    gone = sorted((each for each in workers if each.state != "alive"), key=lambda each: -each.heard_at)
    if any(trouble is None for _, trouble in here):
        none, more = [], 0
        shown = [each for each in gone if each.state == "dead" and now - each.heard_at < RECENT_S]
    else:
        none, shown, more = ["0 workers serve it"], gone[:MOST_GONE], max(0, len(gone) - MOST_GONE)
    troubles = [*here, *((each, _trouble(ledger, now, each)) for each in shown)]
    words = [f"{each.name} {trouble}" for each, trouble in troubles if trouble]
    return "; ".join([*none, *words, *([f"{more} others went before them"] if more else [])])


def trainer_words(ledger: Ledger, now: float, policy: str) -> str:
    """What is wrong with its trainer; nothing, where it lives or has left."""
    row = ledger.store.one(
        "SELECT c.name, c.state, c.heard_at FROM trainers t JOIN components c ON c.component = 'trainer' "
        "AND c.name = t.name WHERE t.policy = ?",
        policy,
    )
    if row is None:
        return "no trainer of it has registered yet"
    return f"its trainer {row[0]} is dead, last heard of {max(0.0, now - row[2]):.0f} s ago" if row[1] == "dead" else ""


def serves(ledger: Ledger, worker: ComponentRow) -> bool:
    """One without an engine counts: whether supervised tasks are all that is left, only Curate knows."""
    if worker.state != "alive" or worker.report.doing == QUARANTINED:
        return False
    return not worker.policies or ledger.needed_policies() <= set(worker.policies)


def _trouble(ledger: Ledger, now: float, worker: ComponentRow) -> str | None:
    """Why this one does not help; None: it does."""
    report = worker.report
    if worker.state != "alive":
        ago = f"{worker.state}, last heard of {max(0.0, now - worker.heard_at):.0f} s ago"
        return ago + _because(report.error or (report.why if worker.state == "left" else ""))
    if report.doing == QUARANTINED:
        return QUARANTINED + _because(report.why or report.error)
    if not serves(ledger, worker):
        return f"serves {'+'.join(worker.policies)} only"
    return None


def _because(text: str | None) -> str:
    return f": {text}" if text else ""


def learned(ledger: Ledger, policy: str, last: int) -> str:
    """What the rewards of the last groups without signal say: the task is learned, or never got right."""
    bounds = ledger.store.one("SELECT MIN(reward), MAX(reward) FROM group_policy WHERE policy = ?", policy)
    rewards = [
        reward
        for reward, reason in ledger.store.all(
            "SELECT reward, reason FROM group_policy WHERE policy = ? AND state = 'dropped' "
            "ORDER BY group_id DESC LIMIT ?",
            policy,
            last,
        )
        if reward is not None and reason in ("zero_variance", "zero_advantage")
    ]
    if not rewards or bounds is None:
        return ""
    lowest, highest = bounds
    if isclose(lowest, highest):
        return f"; every reward so far was {highest:g}: nothing tells good from bad"
    right = sum(isclose(reward, highest) for reward in rewards)
    wrong = sum(isclose(reward, lowest) for reward in rewards)
    if right == len(rewards):
        return f"; all rewards at the highest seen ({highest:g}): the policy has learned these tasks"
    if wrong == len(rewards):
        return f"; all rewards at the lowest seen ({lowest:g}): the policy gets none of these tasks right"
    return f"; {right} groups all at the highest reward seen ({highest:g}), {wrong} all at the lowest ({lowest:g})"
