"""What ``Counts`` must say: the same as reading every row."""

from __future__ import annotations

from collections import Counter

from astraflow.dataflow.ledger import Ledger


def assert_counted(ledger: Ledger) -> None:
    store, counts = ledger.store, ledger.counts
    assert counts.episodes() == dict(store.all("SELECT state, COUNT(*) FROM episodes GROUP BY state"))
    for policy in ledger.policies.specs:
        groups = store.all("SELECT state, reason FROM group_policy WHERE policy = ?", policy)
        named = Counter(state if reason is None else f"{state}/{reason}" for state, reason in groups)
        assert counts.groups(policy) == named
        ages = store.all("SELECT age FROM samples WHERE policy = ? AND state = 'trained' AND age IS NOT NULL", policy)
        assert counts.ages(policy) == Counter(str(age) for (age,) in ages)
