"""Bearer tokens by role: what a process may do is decided by the token that its launcher gave it (F96).

Made into the run folder (mode 0600), handed down by environment variable, never on a command line; no token is ever in
a repr, a log line or an error's text.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from astraflow.errors import ConfigError, Forbidden, Unauthorised
from astraflow.types import Manifest
from astraflow.wire.calls import Call, Role
from astraflow.wire.names import require_name

ENVIRONMENT = "ASTRAFLOW_TOKEN"
FILE = "tokens.json"


@dataclass(frozen=True, slots=True)
class Grant:
    """What the bearer of a token may do."""

    role: Role
    policy: str | None = None
    """A trainer's own."""

    def require_role(self, call: Call) -> None:
        """Raise Forbidden unless this role may make this call at all."""
        if self.role not in call.roles:
            raise Forbidden(f"a token of role {self.role} may not call {call.name}")

    def require_policy(self, call: Call, request: object) -> None:
        """Raise Forbidden if a trainer speaks for a policy that is not its own; reading manifests is free."""
        if self.role is not Role.TRAINER or call.name == "manifest":
            return
        named = {getattr(request, "policy", None)}
        manifest = getattr(request, "manifest", None)
        if isinstance(manifest, Manifest):
            named.add(manifest.policy)
        for other in named - {None, self.policy}:
            raise Forbidden(f"the trainer of policy {self.policy} may not call {call.name} for {other}")

    def require_component(self, call: Call, request: object) -> None:
        """Raise Forbidden if a worker or a trainer speaks as a component of another kind."""
        named = getattr(request, "component", None)
        own = {Role.WORKER: "rollout", Role.TRAINER: "trainer"}.get(self.role)
        if named is not None and own is not None and named != own:
            raise Forbidden(f"a token of role {self.role} may not call {call.name} as {named}")

    def require_upload(self) -> None:
        """Raise Forbidden unless this role may write weights."""
        if self.role is Role.WORKER:
            raise Forbidden(f"a token of role {self.role} may not write weights")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of one run."""

    worker: str = field(repr=False)
    operator: str = field(repr=False)
    trainers: Mapping[str, str] = field(repr=False)
    """By policy."""

    def __post_init__(self) -> None:
        every = [self.worker, self.operator, *self.trainers.values()]
        if any(len(token) < 16 or not token.isascii() for token in every) or len(set(every)) < len(every):
            raise ConfigError("tokens must be distinct, ASCII and at least 16 characters long")

    @classmethod
    def make(cls, policies: Iterable[str]) -> Tokens:
        """New random tokens for a run that trains ``policies``."""
        trainers = {require_name(policy, "policy"): secrets.token_urlsafe(32) for policy in policies}
        return cls(worker=secrets.token_urlsafe(32), operator=secrets.token_urlsafe(32), trainers=trainers)

    def write(self, folder: Path) -> Path:
        """Store as ``tokens.json`` in a run folder, readable by its owner only."""
        path = folder / FILE
        data = {"worker": self.worker, "operator": self.operator, "trainers": dict(self.trainers)}
        part = path.with_name(f".{FILE}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(data))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        return path

    @classmethod
    def read(cls, folder: Path) -> Tokens:
        """The tokens of a run folder. ConfigError says what is wrong with the file, never what is in it."""
        path = folder / FILE
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing: is this a run folder?") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{path} cannot be read ({type(error).__name__}): restore it or start a new run"
            ) from None
        return cls(worker=stored.worker, operator=stored.operator, trainers=stored.trainers)

    def of(self, role: Role, policy: str | None = None) -> str:
        """The token to hand to a process of that role. A policy that joined later has one too, made of the operator's:
        whoever has the run folder can make it, nobody else."""
        if role is Role.TRAINER:
            if policy is None:
                raise ConfigError("a trainer's token is of a policy: name it")
            return self.trainers[policy] if policy in self.trainers else self._later(policy)
        return self.worker if role is Role.WORKER else self.operator

    def grant(self, token: str) -> Grant:
        """What the bearer may do. Every stored token is compared, each in constant time. Raises Unauthorised."""
        given = token.encode("utf-8", "surrogateescape")
        found: Grant | None = None
        for stored, grant in self._grants():
            if hmac.compare_digest(stored.encode(), given):
                found = grant
        policy, _, proof = token.rpartition(":")
        if proof and policy not in self.trainers and hmac.compare_digest(self._later(policy).encode(), given):
            found = Grant(Role.TRAINER, require_name(policy, "policy"))
        if found is None:
            raise Unauthorised("the token is not one of this run: take it from the run folder's tokens.json")
        return found

    def _later(self, policy: str) -> str:
        return f"{policy}:{derived(self.operator, f'astraflow trainer 1 {policy}'.encode())}"

    def _grants(self) -> Iterable[tuple[str, Grant]]:
        yield self.worker, Grant(Role.WORKER)
        yield self.operator, Grant(Role.OPERATOR)
        for policy, token in self.trainers.items():
            yield token, Grant(Role.TRAINER, policy)


def derived(token: str | None, purpose: bytes) -> str | None:
    """What opens one kind of port between the workers of a run: each can derive it, nobody can go back from it."""
    return None if token is None else hmac.new(token.encode(), purpose, hashlib.sha256).hexdigest()


def is_bearer_of(token: str, authorization: str) -> bool:
    """Whether the Authorization header holds this token; compared in constant time, whatever bytes came."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    operator: str
    trainers: dict[str, str]


def lend(folder: Path | None, role: Role, policy: str | None = None) -> None:
    """To this process, unless it was given one: that of a run folder which lies here, if its owner may read it."""
    if folder is None or os.environ.get(ENVIRONMENT) or not (folder / FILE).exists():
        return
    tokens = Tokens.read(folder)
    if role is Role.TRAINER and policy is None and len(tokens.trainers) == 1:
        (policy,) = tokens.trainers
    if role is not Role.TRAINER or policy is not None:
        os.environ[ENVIRONMENT] = tokens.of(role, policy)


def from_environment() -> str | None:
    """The token that the launcher gave to this process, if any."""
    return os.environ.get(ENVIRONMENT) or None
