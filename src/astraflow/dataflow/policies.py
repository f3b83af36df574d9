"""Policies, their versions and what was published: one stream per policy, none of them waits for another.

A policy that joined while the run went on is a row like any other; beside it a note in ``meta`` says what of the
recipe it is like. Who plays which role may change too; a group is played to its end by whom it was opened for.
"""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec

from astraflow.dataflow.settings import PolicySpec, RunSpec
from astraflow.dataflow.store import Store
from astraflow.errors import BadRequest, Fenced, NotFound, UnknownVersion
from astraflow.types import Manifest
from astraflow.wire.codec import decode, encode
from astraflow.wire.messages import AddedPolicy

ADDED, CAST = "added/", "cast"
"""Keys in ``meta``: by policy, how it joined; and who plays which role, once that is not what the recipe says."""


class Policies:
    """``newest`` and ``published`` are memories of the tables, so that hot calls need no query; ``reload`` renews."""

    def __init__(self, store: Store, spec: RunSpec) -> None:
        self._store = store
        self._spec = spec
        self.specs: dict[str, PolicySpec] = {}
        """The recipe's policies, then those that joined."""
        self.added: dict[str, AddedPolicy] = {}
        self.roles: dict[str, str] = {}
        """Who plays what in a group that is opened now."""
        self.newest: dict[str, Manifest] = {}
        self.published: set[tuple[str, int, str]] = set()
        self.versions: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        """Committed versions at which each policy ends: the recipe's, or where it was frozen."""
        self.changes = 0
        """Grows with every change of these memories: whoever rolls a change back must reload."""

    def declare(self) -> None:
        """Every policy of the recipe has a row."""
        for name, spec in self._spec.policies.items():
            self._store.run(
                "INSERT INTO policies (name, trainable) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
                (name, int(spec.trainable)),
            )

    def reload(self) -> None:
        self.newest = {}
        self.published = set()
        self.versions = dict(self._store.all("SELECT name, version FROM policies"))
        noted = self._store.all("SELECT value FROM meta WHERE key GLOB ? ORDER BY key", ADDED + "*")
        self.added = {each.name: each for each in (msgspec.json.decode(text, type=AddedPolicy) for (text,) in noted)}
        self.specs = {**self._spec.policies, **{name: self._like(each) for name, each in self.added.items()}}
        cast = self._store.get(CAST)
        self.roles = dict(self._spec.roles) if cast is None else json.loads(str(cast))
        self.steps = {name: self._ends(name) for name in self.specs}
        for policy, version, digest in self._store.all("SELECT policy, version, digest FROM publications"):
            self.published.add((policy, version, digest))
        for policy, blob in self._store.all(
            "SELECT p.policy, p.manifest FROM publications p "
            "JOIN policies n ON n.name = p.policy AND n.serial = p.serial"
        ):
            self.newest[policy] = decode(blob, Manifest)

    def _ends(self, policy: str) -> int:
        frozen = self._store.get(_frozen(policy))
        return self._steps_of(policy) if frozen is None else int(frozen)

    def _steps_of(self, policy: str) -> int:
        """Committed versions at which it ends, unless it is frozen; what is not trained has none to make."""
        spec = self.specs[policy]
        own = self._spec.steps if spec.steps is None else spec.steps
        return own if spec.trainable else 0

    def _like(self, added: AddedPolicy) -> PolicySpec:
        like = self._spec.policies[added.like]
        return replace(like, trainable=added.trainable, average_of=added.average_of)

    @property
    def trainable(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.specs.items() if spec.trainable)

    @property
    def cast(self) -> dict[str, str]:
        """Role to policy where that is no longer the recipe's; empty: it is."""
        return {} if self.roles == self._spec.roles else dict(self.roles)

    def join(self, now: float, added: AddedPolicy, initial: Manifest) -> None:
        """A policy more, whose version 0 is ``initial``."""
        self._store.run("INSERT INTO policies (name, trainable) VALUES (?, ?)", (added.name, int(added.trainable)))
        groups = self._store.number("SELECT COALESCE(MAX(id), 0) FROM groups")
        self._store.set(ADDED + added.name, msgspec.json.encode(msgspec.structs.replace(added, since=groups)).decode())
        self._store.event(
            now, "added", policy=added.name, like=added.like, trainable=added.trainable, average_of=added.average_of
        )
        self.reload()
        self.changes += 1
        self.publish(now, initial, after=initial.serial)

    def recast(self, now: float, role: str, policy: str) -> None:
        """From now on, in groups that are opened from now on, ``policy`` plays ``role``."""
        self.roles = {**self.roles, role: policy}
        self.changes += 1
        self._store.set(CAST, json.dumps(self.roles))
        self._store.event(now, "cast", policy=policy, role=role)

    def freeze(self, now: float, policy: str) -> int:
        """It ends at the version that it has: it plays on and is trained no more. Returns that version."""
        version = self.versions[policy]
        self._store.set(_frozen(policy), version)
        self.changes += 1
        self.steps[policy] = version
        self._store.event(now, "frozen", policy=policy, version=version)
        return version

    def is_frozen(self, policy: str) -> bool:
        return self._store.get(_frozen(policy)) is not None

    def unfreeze(self, now: float, policy: str) -> None:
        """It ends where it would have ended."""
        self._store.run("DELETE FROM meta WHERE key = ?", (_frozen(policy),))
        self.changes += 1
        self.steps[policy] = self._ends(policy)
        self._store.event(now, "unfrozen", policy=policy, version=self.versions[policy])

    def kept(self) -> set[tuple[str, int]]:
        """(policy, version) of every ``keep_every``-th version: opponents from the past."""
        every = {name: spec.keep_every for name, spec in self.specs.items() if spec.keep_every}
        found = {(name, version) for name, version, _ in self.published if name in every and not version % every[name]}
        return found | {(name, 0) for name in self.added}  # of the others the launcher has it

    @property
    def complete(self) -> bool:
        """Whether every policy has a version that can be served."""
        return self.newest.keys() >= self.specs.keys()

    def require(self, policy: str, *, trainable: bool = False) -> None:
        spec = self.specs.get(policy)
        if spec is None or (trainable and not spec.trainable):
            known = [name for name in self.specs if not trainable or name in self.trainable]
            raise BadRequest(f"no {'trainable ' if trainable else ''}policy {policy!r} in this run; known: {known}")

    def require_epoch(self, policy: str, trainer_epoch: int) -> None:
        """Raises Fenced for an older trainer, BadRequest for one that never resumed."""
        self.require(policy, trainable=True)
        current = self._store.number("SELECT trainer_epoch FROM policies WHERE name = ?", policy)
        if trainer_epoch > current or trainer_epoch < 1:
            raise BadRequest(f"trainer epoch {trainer_epoch} of {policy} was never given (now {current}): resume first")
        if trainer_epoch < current:
            raise Fenced(
                f"trainer epoch {trainer_epoch} of {policy} was replaced by {current}: a newer trainer resumed"
            )

    def publish(self, now: float, manifest: Manifest, *, trainer_epoch: int = 0, after: int = 0) -> Manifest:
        """The next serial of its policy, at least ``after`` + 1: workers follow it."""
        policy = manifest.policy
        serial = max(after, self._store.number("SELECT serial FROM policies WHERE name = ?", policy)) + 1
        stamped = msgspec.structs.replace(manifest, serial=serial, trainer_epoch=trainer_epoch)
        self._store.run(
            "INSERT INTO publications (policy, serial, version, digest, manifest, at) VALUES (?, ?, ?, ?, ?, ?)",
            (policy, serial, stamped.version, stamped.digest, encode(stamped), now),
        )
        self._store.run("UPDATE policies SET serial = ? WHERE name = ?", (serial, policy))
        self.changes += 1
        self.newest[policy] = stamped
        self.published.add((policy, stamped.version, stamped.digest))
        self._store.event(
            now, "published", policy=policy, serial=serial, version=stamped.version, digest=stamped.digest
        )
        return stamped

    def publish_initial(self, now: float, manifest: Manifest) -> bool:
        """Version 0, once; False if these weights are already it. Raises UnknownVersion for other weights."""
        self.require(manifest.policy)
        if manifest.version != 0:
            raise BadRequest(f"the initial weights are version 0, found {manifest.version}")
        found = self._store.one("SELECT digest FROM publications WHERE policy = ? AND version = 0", manifest.policy)
        if found is None:
            self.publish(now, manifest, after=manifest.serial)
            return True
        if found[0] != manifest.digest:
            raise UnknownVersion(
                f"version 0 of {manifest.policy} was {found[0][:12]}…, these weights are {manifest.digest[:12]}…: "
                "this run folder belongs to another model"
            )
        return False

    def set_version(self, policy: str, version: int) -> None:
        self._store.run("UPDATE policies SET version = ? WHERE name = ?", (version, policy))
        self.changes += 1
        self.versions[policy] = version

    def manifest(self, policy: str, version: int | None) -> Manifest:
        """The newest, or the newest publication of ``version``. Raises NotFound."""
        self.require(policy)
        if version is None:
            found = self.newest.get(policy)
            if found is None:
                raise NotFound(f"nothing of {policy} is published yet")
            return found
        row = self._store.one(
            "SELECT manifest FROM publications WHERE policy = ? AND version = ? ORDER BY serial DESC LIMIT 1",
            policy,
            version,
        )
        if row is None:
            raise NotFound(f"version {version} of {policy} was never published (now {self.versions[policy]})")
        return decode(row[0], Manifest)

    def by_serial(self, policy: str, serial: int) -> Manifest | None:
        row = self._store.one("SELECT manifest FROM publications WHERE policy = ? AND serial = ?", policy, serial)
        return decode(row[0], Manifest) if row else None

    def at(self, policy: str, version: int, digest: str) -> Manifest | None:
        """The newest publication of exactly these weights."""
        row = self._store.one(
            "SELECT manifest FROM publications WHERE policy = ? AND version = ? AND digest = ? "
            "ORDER BY serial DESC LIMIT 1",
            policy,
            version,
            digest,
        )
        return decode(row[0], Manifest) if row else None


def _frozen(policy: str) -> str:
    return f"frozen/{policy}"
