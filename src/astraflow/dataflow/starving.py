"""A policy that cannot get a batch: a diagnosis, and what the recipe wants done (``Limits.when_starved``).

stop            the run fails as Starved, exit code not 0
smaller_batch   cut what is kept, once; nothing kept: stop
wait            say so and go on, where a worker that joins or a lucky group may end it; else stop
"""

from __future__ import annotations

from astraflow.dataflow.diagnosis import lacks, learned, no_batch, trainer_words, waits_since
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.settle import TOO_FEW

NOBODY = "no worker served it"
NO_TRAINER = "no trainer of it was heard of"
CHOSE_NONE = "chose none of the"


def starve(ledger: Ledger, now: float, policy: str, cause: str, *, hopeless: bool = False) -> bool:
    """True if the run was stopped. ``hopeless``: nothing that may still happen ends it by itself."""
    if ledger.state != "running":
        return True
    head = no_batch(ledger, policy, cause)
    sentence = f"{head}; {lacks(ledger, now, policy)}"
    action = ledger.spec.limits.when_starved
    if action == "smaller_batch" and ledger.batches.head(policy) is None and ledger.groups.kept(policy):
        ledger.store.set(_smaller(policy), 1)
        _note(ledger, now, policy, head, sentence)
        return False
    if action == "wait" and not hopeless:
        _note(ledger, now, policy, head, sentence)
        return False
    ledger.stop(now, "Starved", sentence)
    return True


def starve_if_barren(ledger: Ledger, now: float, policy: str) -> None:
    """So many groups in a row not kept that no batch will ever fill: the policy has learned the task, or cannot."""
    barren = ledger.store.number("SELECT barren FROM policies WHERE name = ?", policy)
    limits = ledger.spec.limits
    limit = max(limits.barren_groups, limits.no_signal_limit * ledger.policies.specs[policy].groups_per_batch)
    if barren < limit or ledger.trained_out(policy):
        return
    reasons = ledger.store.all(
        "SELECT reason, COUNT(*) FROM (SELECT reason FROM group_policy WHERE policy = ? AND state = 'dropped' "
        "ORDER BY group_id DESC LIMIT ?) GROUP BY reason ORDER BY 2 DESC",
        policy,
        barren,
    )
    counts = ", ".join(f"{reason} {count}" for reason, count in reasons)
    failure = _first_failure(ledger, policy, barren) if any(reason == TOO_FEW for reason, _ in reasons) else ""
    cause = (
        f"it kept none of its last {barren} groups ({counts}) at version {ledger.policies.versions[policy]}"
        f"{learned(ledger, policy, barren)}{failure}; limit {limit} = the larger of barren_groups and "
        "no_signal_limit x groups_per_batch"
    )
    if not starve(ledger, now, policy, cause):
        ledger.store.run("UPDATE policies SET barren = 0 WHERE name = ?", (policy,))


def _first_failure(ledger: Ledger, policy: str, last: int) -> str:
    """Groups that are too small have a cause in one of their members."""
    row = ledger.store.one(
        "SELECT e.group_id, e.idx, e.error FROM episodes e JOIN (SELECT group_id FROM group_policy WHERE policy = ? "
        "AND state = 'dropped' ORDER BY group_id DESC LIMIT ?) d ON d.group_id = e.group_id "
        "WHERE e.error IS NOT NULL ORDER BY e.group_id, e.idx LIMIT 1",
        policy,
        last,
    )
    return "" if row is None else f"; first failure, episode {row[0]}/{row[1]}: {row[2]}"


def starve_without_signal(ledger: Ledger, now: float, policy: str, reason: str) -> None:
    """After a batch that made no step: too many in a row will not get better."""
    limit = ledger.spec.limits.no_signal_limit
    batches = ledger.store.number("SELECT no_signal FROM policies WHERE name = ?", policy)
    if batches < limit:
        return
    cause = (
        f"{batches} batches in a row made no step (last: {reason}) at version {ledger.policies.versions[policy]}; "
        f"limit {limit}"
    )
    if not starve(ledger, now, policy, cause):
        ledger.store.run("UPDATE policies SET no_signal = 0 WHERE name = ?", (policy,))


def smaller_batch(ledger: Ledger, policy: str) -> bool:
    """Whether the next batch may be of what is kept; that leave lapses where nothing is."""
    if ledger.store.get(_smaller(policy)) is None:
        return False
    if ledger.groups.kept(policy):
        return True
    ledger.store.run("DELETE FROM meta WHERE key = ?", (_smaller(policy),))
    return False


def starve_untrained(ledger: Ledger, now: float, policy: str, for_s: float) -> None:
    """It has a batch, and nobody trains it: no smaller one helps, and only ``wait`` has a trainer to hope for."""
    who = trainer_words(ledger, now, policy) or "the last one has left"
    since = ledger.time_text(waits_since(ledger, policy))
    sentence = (
        f"no step of policy {policy} since {since}: {NO_TRAINER} for {for_s:.0f} s (limit "
        f"{ledger.spec.limits.starved_after_s:g} s), and a batch waits for one; {who}; start "
        f"'astraflow trainer --policy {policy}' and look into the log of the one before"
    )
    if ledger.spec.limits.when_starved == "wait":
        _note(ledger, now, policy, sentence, sentence)
    else:
        ledger.stop(now, "Starved", sentence)


def starve_unchosen(ledger: Ledger, now: float, policy: str, for_s: float) -> None:
    """Select has a whole batch and takes none of it: no smaller one helps, and only ``wait`` has another answer to hope
    for."""
    limit = ledger.spec.limits.starved_after_s
    cause = f"{ledger.unchosen[policy].words} for {for_s:.0f} s (limit {limit:g} s)"
    head = no_batch(ledger, policy, cause)
    sentence = f"{head}; {lacks(ledger, now, policy)}"
    if ledger.spec.limits.when_starved == "wait":
        _note(ledger, now, policy, head, sentence)
    else:
        ledger.stop(now, "Starved", sentence)


def served(ledger: Ledger) -> None:
    """There is a worker again: whoever was told to wait for one need not be told any more."""
    for policy in ledger.policies.trainable:
        _unsay(ledger, policy, NOBODY)


def trained(ledger: Ledger, policy: str) -> None:
    """There is a trainer again, or nothing for one to do."""
    _unsay(ledger, policy, NO_TRAINER)


def chosen(ledger: Ledger, policy: str) -> None:
    """Select has chosen, or has something to wait for."""
    _unsay(ledger, policy, CHOSE_NONE)


def _unsay(ledger: Ledger, policy: str, cause: str) -> None:
    if cause in (starved_words(ledger, policy) or ""):
        ledger.store.run("DELETE FROM meta WHERE key = ?", (_said(policy),))


def fed(ledger: Ledger, policy: str) -> None:
    """It got a batch."""
    ledger.store.run("DELETE FROM meta WHERE key IN (?, ?)", (_smaller(policy), _said(policy)))


def starved_words(ledger: Ledger, policy: str) -> str | None:
    """Why it waits, of what has a diagnosis; None: it is not starved."""
    found = ledger.store.get(_said(policy))
    return None if found is None else str(found)


def waits_words(ledger: Ledger, now: float, policy: str) -> str:
    """What its next batch waits for now, and why that is no wait like others, where there is a diagnosis."""
    said, unchosen = starved_words(ledger, policy), ledger.unchosen.get(policy)
    choice = unchosen.words if unchosen is not None and CHOSE_NONE not in (said or "") else None
    return "; ".join(filter(None, [said, choice, lacks(ledger, now, policy)]))


def _note(ledger: Ledger, now: float, policy: str, head: str, sentence: str) -> None:
    """Once per spell. ``head``: what of the sentence stays true."""
    if ledger.store.get(_said(policy)) is None:
        ledger.store.set(_said(policy), head)
        ledger.store.count("starved")
        ledger.store.event(now, "starved", policy=policy, why=sentence, action=ledger.spec.limits.when_starved)


def _smaller(policy: str) -> str:
    return f"smaller_batch/{policy}"


def _said(policy: str) -> str:
    return f"starved/{policy}"
