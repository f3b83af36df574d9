"""Every exception that AstraFlow raises on purpose. Messages say what, where and what to do, without a full stop.

AstraFlowError
  Refused                  the other side said no: nothing changed
    BadRequest             400  the call itself is malformed or names what does not exist
      InvalidRecord        400  a record breaks its own rules
      UnknownLease         400  no such lease was ever given
      UnknownVersion       400  no published row has this (policy, version, digest)
    Unauthorised           401  no token or a wrong one
    Forbidden              403  the token's role may not make this call
    NotFound               404  no such manifest, file, run
    Conflict               409
      Fenced               409  a newer attempt or trainer epoch exists
      Closed               409  the group ended without this episode
      VersionConflict      409  the commit does not follow the current version
      ConfigMismatch       409  another config or code digest
      NameTaken            409  another live component has this name
      Pruned               409  the data that this would need is no longer stored
    TooLarge               413  body over the limit
    StorageFull            507  dataflow cannot write; it takes no work until space is back
  Unavailable              503  could not be reached or is starting; the only error that a client retries
  ServerError              the other side failed in a way that it did not foresee; its log has the cause
  ProtocolError            an answer is not one of ours: another program or version listens there
  TimedOut                 a named wait reached its deadline
  ConfigError              a recipe, setting or argument is wrong; found before anything starts
  DigestMismatch           bytes or weights are not what their digest says
  WeightsRefused           weights cannot be loaded here: missing, extra or reshaped tensors
    FullTransferNeeded       a delta cannot lead there: another form, or other weights to start from
    Unattested               an engine took weights and does not hold what was published: ``diagnosis: what was seen``
  Starved                  a state that the policy of the recipe can never leave; carries the counts
  EpisodeError             ends one episode, never the worker
    EpisodeTruncated         a turn was cut or a limit reached: no further turn, the episode ends as truncated
      SpawnRefused           no further agent: a limit of depth, children or agents was reached; may be caught
    EpisodeOver              an agent was asked after its episode had ended
    EngineFailed             the engine could not answer: failed(infra)
    EnvFailed                the environment broke: failed(env)
    GraderFailed             the grader raised, hung or gave no number: failed(grader)
  RunFailed                the run stopped with a first cause
"""

from __future__ import annotations


class AstraFlowError(Exception):
    """Root of the tree; ``kind`` is the name on the wire."""

    status = 500

    @property
    def kind(self) -> str:
        return type(self).__name__


class Refused(AstraFlowError):
    status = 400


class BadRequest(Refused):
    status = 400


class InvalidRecord(BadRequest, ValueError):
    """Also a ValueError: msgspec then names the path of the field when it decodes."""


class UnknownLease(BadRequest): ...


class UnknownVersion(BadRequest): ...


class Unauthorised(Refused):
    status = 401


class Forbidden(Refused):
    status = 403


class NotFound(Refused):
    status = 404


class Conflict(Refused):
    status = 409


class Fenced(Conflict): ...


class Closed(Conflict): ...


class VersionConflict(Conflict): ...


class ConfigMismatch(Conflict): ...


class NameTaken(Conflict): ...


class Pruned(Conflict): ...


class TooLarge(Refused):
    status = 413


class StorageFull(Refused):
    status = 507


class Unavailable(AstraFlowError):
    status = 503


class ServerError(AstraFlowError):
    status = 500


class ProtocolError(AstraFlowError):
    status = 502


class TimedOut(AstraFlowError):
    status = 504


class ConfigError(AstraFlowError, ValueError): ...


class DigestMismatch(AstraFlowError): ...


class WeightsRefused(AstraFlowError): ...


class FullTransferNeeded(WeightsRefused): ...


class Unattested(WeightsRefused): ...


class Starved(AstraFlowError): ...


class EpisodeError(AstraFlowError): ...


class EpisodeTruncated(EpisodeError): ...


class SpawnRefused(EpisodeTruncated): ...


class EpisodeOver(EpisodeError): ...


class EngineFailed(EpisodeError): ...


class EnvFailed(EpisodeError): ...


class GraderFailed(EpisodeError): ...


class RunFailed(AstraFlowError): ...


def by_kind() -> dict[str, type[AstraFlowError]]:
    """Every class of the tree by its wire name."""
    found: dict[str, type[AstraFlowError]] = {}
    todo: list[type[AstraFlowError]] = [AstraFlowError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found
