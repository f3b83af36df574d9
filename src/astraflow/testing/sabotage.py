"""Guarantees switched off on purpose: a test of faults must show that it would notice.

A recipe calls ``switch_off`` when it is imported, so that every process of its run is without the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from astraflow.dataflow.batches import Batches
from astraflow.dataflow.policies import Policies
from astraflow.errors import ConfigError
from astraflow.trainer.checkpoints import Checkpoints
from astraflow.types import Manifest


def _uncommit() -> None:
    """A trainer that comes back with an older checkpoint goes on from the newest version as if it had it."""
    _replace(Batches, "undo", lambda *_: ())


def _fencing() -> None:
    """A trainer that was replaced goes on: what it commits is taken, and the policy is then at its version."""
    commit = Batches.commit

    def taken(
        self: Batches, now: float, policy: str, batch: int, epoch: int, made: Manifest, metrics: Mapping[str, float]
    ) -> bool:
        state, _, owner, _, _ = self.find(policy, batch)
        if (state, owner) != ("committed", epoch):  # asked again it changes nothing, as ever
            self._policies.set_version(policy, made.version - 1)
            self._store.run("UPDATE batches SET version = ? WHERE id = ?", (made.version - 1, batch))
        return commit(self, now, policy, batch, epoch, made, metrics)

    _replace(Policies, "require_epoch", lambda *_: None)
    _replace(Batches, "_require_issued", lambda *_: None)
    _replace(Batches, "commit", taken)
    _replace(Checkpoints, "_require_own", lambda *_: None)


SWITCHES: dict[str, Callable[[], None]] = {"uncommit": _uncommit, "fencing": _fencing}


def switch_off(what: str) -> None:
    """For good, in this process. Raises ConfigError."""
    if what not in SWITCHES:
        raise ConfigError(f"only {', '.join(SWITCHES)} can be switched off, found {what!r}")
    SWITCHES[what]()


def _replace(owner: type, name: str, by: Callable[..., Any]) -> None:
    getattr(owner, name)  # renamed there, it must fail here
    setattr(owner, name, by)
