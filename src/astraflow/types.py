"""The data. Every record that crosses a process boundary and is kept is defined in this file, once.

    Task --workflow--> Episode --(x size)--> group --cut--> Batch --step--> version + 1

Shape letters: T tokens of one sample; G episodes of one group; U units of one group.
Versions are ints, one counter per policy; version 0 is the initial weights and step s makes version s.
Times are seconds on dataflow's clock, durations end in ``_s``. Token ids int32; log-probs natural log, float32.
Records validate themselves once, when they are made; afterwards nobody checks.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from astraflow.errors import InvalidRecord

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
else:
    Array = np.ndarray


HIGHEST_LOGPROB = 1e-3
"""0, and what a kernel's rounding may add."""
MAX_TURNS = 1 << 31
"""Of one episode."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all wire records. Fields may be added with a default; never removed, renamed or retyped."""


class Outcome(StrEnum):
    """How an episode ended. Only COMPLETED and TRUNCATED may enter a baseline."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Ended by a token or turn limit; graded all the same."""
    FAILED = "failed"
    """Ended by a fault. Never a reward of zero; ``FailureKind`` says whose fault."""


class FailureKind(StrEnum):
    """Whose fault a failed episode is."""

    INFRA = "infra"
    ENV = "env"
    GRADER = "grader"
    WORKFLOW = "workflow"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Purpose(StrEnum):
    """What a group is for. Eval groups are never cut into a batch."""

    TRAIN = "train"
    EVAL = "eval"


class SampleKind(StrEnum):
    """Which loss a sample takes; only ``rl`` samples are seen by Keep and Credit."""

    RL = "rl"
    SUPERVISED = "supervised"


class StopReason(StrEnum):
    """Why an engine stopped a reply. It alone decides truncation, never a token id or a length (F14)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Task(Record, frozen=True, kw_only=True):
    """One dataset row."""

    key: str
    """Stable and unique in the dataset; held-out splits hash it."""
    dataset: str = "tasks"
    payload: dict[str, Any] = {}
    """Whatever the workflow reads; msgpack types only."""
    workflow: str = ""
    """Empty: the recipe's. ``supervised``: no engine, payload holds ``messages`` and ``policy``; the row is tokenised
    and its assistant replies are targets."""
    features: dict[str, Array] = {}
    """Numbers for data algorithms, computed at the edge."""


class Sampling(Record, frozen=True, kw_only=True):
    """How one reply is sampled. Log-probs are those of softmax(logits / temperature), before top-p and top-k."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy: for evaluation only; its log-probs are those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop: tuple[str, ...] = ()
    """Stop strings: generation ends after the token that completes one; that token is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the engine's own end-of-turn ids."""
    seed: int | None = None
    """The draw of token n depends on (seed, n) alone. None: the caller must fill it in before the engine."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRecord(f"Sampling.max_tokens must be at least 1, found {self.max_tokens}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InvalidRecord(f"Sampling.temperature must be finite and >= 0, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidRecord(f"Sampling.top_p must be in (0, 1], found {self.top_p}")
        if self.top_k < 0:
            raise InvalidRecord(f"Sampling.top_k must be >= 0 (0 is off), found {self.top_k}")


class Span(Record, frozen=True, kw_only=True, array_like=True):
    """Tokens ``[start, stop)`` were sampled by the weights of ``version`` (in-flight updates give several)."""

    start: int
    stop: int
    version: int
    digest: str
    """Digest of the weights as loaded, never as announced (F56)."""


class Sample(Record, frozen=True, kw_only=True):
    """One trainable row: what the model saw and sampled, never re-tokenised.

    Example (prompt P, answer A, tool reply E, answer B; weights changed before B):
        tokens  = P + A + E + B
        sampled = [0]*|P| + [1]*|A| + [0]*|E| + [1]*|B|
        spans   = (Span(|P|, |P+A|, 7, d7), Span(|P+A+E|, T, 8, d8))        # min_version 7
    """

    tokens: Array
    """int32 [T]"""
    sampled: Array
    """bool [T]: True where the policy sampled the token (rl) or where it is a target (supervised)."""
    logprobs: Array
    """float32 [T]: behaviour log-prob; exactly 0.0 where ``sampled`` is False, and everywhere if supervised."""
    spans: tuple[Span, ...] = ()
    """Cover exactly the sampled tokens, in order; empty if supervised (which has no version, never stale)."""
    kind: SampleKind = SampleKind.RL

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if not len(self.sampled) == len(self.logprobs) == length:
            raise InvalidRecord(
                f"Sample: tokens, sampled, logprobs must have one length, found {length}, "
                f"{len(self.sampled)}, {len(self.logprobs)}"
            )
        _require_dtype("Sample.tokens", self.tokens, np.int32)
        _require_dtype("Sample.sampled", self.sampled, np.bool_)
        _require_dtype("Sample.logprobs", self.logprobs, np.float32)
        if length == 0 or self.sampled[0]:
            raise InvalidRecord("Sample: the first token cannot be sampled, nothing predicts it")
        lowest = int(np.minimum.reduce(self.tokens))
        if lowest < 0:
            raise InvalidRecord(f"Sample.tokens must be >= 0, found {lowest}")
        if self.kind is SampleKind.SUPERVISED:
            if self.spans or self.logprobs.any():
                raise InvalidRecord("Sample: a supervised sample has no spans and no log-probs")
            return
        self._check_sampled_tokens()

    def _check_sampled_tokens(self) -> None:
        # Counts and extremes of whole arrays: cheaper than to pick the sampled tokens out, and every episode passes
        # here. NaN is neither below nor above anything.
        highest, lowest = np.maximum.reduce(self.logprobs), np.minimum.reduce(self.logprobs)
        if not (highest <= HIGHEST_LOGPROB and lowest > -np.inf):
            behaviour = self.logprobs[self.sampled]
            if not np.isfinite(behaviour).all() or (behaviour > HIGHEST_LOGPROB).any():
                raise InvalidRecord("Sample.logprobs must be finite and <= 0 at every sampled token (F50, F93)")
        at = covered = with_logprob = 0
        for span in self.spans:
            if not at <= span.start < span.stop <= len(self.tokens) or span.version < 0:
                raise InvalidRecord(f"Sample.spans must be ordered, within [0, T) and of version >= 0, found {span}")
            at = span.stop
            covered += int(np.count_nonzero(self.sampled[span.start : span.stop]))
            with_logprob += int(np.count_nonzero(self.logprobs[span.start : span.stop]))
        total = sum(span.stop - span.start for span in self.spans)
        if not total == covered == np.count_nonzero(self.sampled):
            raise InvalidRecord("Sample.spans must cover exactly the sampled tokens")
        if with_logprob != np.count_nonzero(self.logprobs):
            raise InvalidRecord("Sample.logprobs must be 0.0 where nothing was sampled")

    @property
    def min_version(self) -> int | None:
        """The oldest version that sampled any token; None if nothing was sampled by a version."""
        return min((span.version for span in self.spans), default=None)


class Turn(Record, frozen=True, kw_only=True):
    """One reply of an agent: the unit of credit. Its tokens are ``samples[sample].tokens[start:stop]``."""

    index: int
    """Order in which the replies of the whole episode were asked for, from 0."""
    sample: int
    """Which of the trajectory's samples holds it."""
    start: int
    stop: int
    stop_reason: StopReason = StopReason.STOP
    parent: int | None = None
    """The turn (by ``index``) during which this one's agent was made; None for a root agent."""
    reward: float | None = None
    """None: not scored, which is not a reward of zero."""
    baseline_key: str = ""
    """Units with equal keys are compared with each other. Empty: the role."""

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise InvalidRecord(f"Turn.reward must be finite or None, found {self.reward}")
        if not 0 <= self.index < MAX_TURNS or self.sample < 0:
            raise InvalidRecord(f"Turn: index in [0, {MAX_TURNS}) and sample >= 0, found {self.index}, {self.sample}")
        if not 0 <= self.start <= self.stop:
            raise InvalidRecord(f"Turn: 0 <= start <= stop, found {self.start}, {self.stop}")


class Trajectory(Record, frozen=True, kw_only=True):
    """One agent's token-exact history for one policy."""

    agent: str
    """Unique in the episode: the role, then ``role#2`` and so on for further agents of the role."""
    role: str
    policy: str
    samples: tuple[Sample, ...] = ()
    turns: tuple[Turn, ...] = ()


class Episode(Record, frozen=True, kw_only=True):
    """One execution of a workflow on a task: every agent's trajectory, or the reason why there is none."""

    task_key: str
    outcome: Outcome
    failure: FailureKind | None = None
    """Set exactly when the outcome is FAILED."""
    error: str | None = None
    final: bool = False
    """Failed, and another attempt could not end otherwise (a prompt longer than the context, F28): never retried."""
    trajectories: tuple[Trajectory, ...] = ()
    score: float | None = None
    """What evaluation averages: the workflow's episode reward, else the mean of the scored turns."""
    features: dict[str, Array] = {}
    metrics: dict[str, float] = {}
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.FAILED) != (self.failure is not None):
            raise InvalidRecord(f"Episode.failure: set exactly when failed, found {self.outcome}, {self.failure}")
        if self.score is not None and not math.isfinite(self.score):
            raise InvalidRecord(f"Episode.score must be finite or None, found {self.score}")


class WeightFile(Record, frozen=True, kw_only=True):
    """One immutable, content-addressed safetensors file."""

    name: str
    sha256: str
    size_bytes: int


class WeightDelta(Record, frozen=True, kw_only=True):
    """One file (``weights.delta_file``) that leads from certain weights to certain others, and from nowhere else."""

    base_digest: str
    digest: str
    """Of the weights that it leads to."""
    file: WeightFile


class CanaryPrompt(Record, frozen=True, kw_only=True):
    """A prompt, a reply, and how likely each token of that is under one version, at temperature 1."""

    text: str = ""  # ``tokens`` are a user saying this, by the publisher's chat template; empty: no template was used
    tokens: tuple[int, ...]
    reply: tuple[int, ...]
    logprobs: tuple[float, ...]
    cold: bool = False  # other tokens in every version, so that no cache can know them; else always the same

    def __post_init__(self) -> None:
        fine = all(math.isfinite(each) and each <= HIGHEST_LOGPROB for each in self.logprobs)
        if not fine or not self.tokens or not self.reply or len(self.reply) != len(self.logprobs):
            raise InvalidRecord("CanaryPrompt: tokens, a reply, and a finite log-prob <= 0 for each of its tokens")


class Canary(Record, frozen=True, kw_only=True):
    """What the publisher's own computation, in ``dtype``, says: an engine with the same weights says the same."""

    dtype: str
    prompts: tuple[CanaryPrompt, ...]


class Manifest(Record, frozen=True, kw_only=True):
    """Where one version of a policy can be read, and its digests."""

    policy: str
    version: int
    digest: str
    """Of the tensors' names, dtypes, shapes and bits: equal on every process that holds these weights."""
    files: tuple[WeightFile, ...]
    """All of them together are the full weights (``base_digest`` None), or adapter tensors on a base."""
    files_digest: str = ""
    """Where not empty: of an earlier version (an anchor), whose full weights ``files`` are; ``deltas`` lead from it."""
    deltas: tuple[WeightDelta, ...] = ()
    """Ways to this version from earlier ones, one or several steps at once; each begins at its ``base_digest``."""
    base_digest: str | None = None
    serial: int = 0
    """Assigned by dataflow; only grows, workers follow the newest. 0: not yet committed."""
    trainer_epoch: int = 0
    canary: Canary | None = None
    form: str = ""  # digest of the tensors' names and shapes, one for all weights of an architecture; empty: not told

    @property
    def stored(self) -> tuple[WeightFile, ...]:
        """Every file that somebody who wants this version may ask for."""
        return (*self.files, *(delta.file for delta in self.deltas))


class Lease(Record, frozen=True, kw_only=True):
    """Permission to play one episode until ``ttl_s`` after the last renewal."""

    group: int
    index: int
    """Which episode of the group."""
    attempt: int
    """Counter of the lease, from 1; a newer attempt fences the older ones."""
    task: Task
    purpose: Purpose = Purpose.TRAIN
    seed: int = 0
    """From (run seed, group, index, attempt): no two siblings share it (F65)."""
    ttl_s: float = 10.0
    time_limit_s: float = 600.0
    """The recipe's limit on one episode, enforced by the worker."""
    versions: dict[str, int] = {}
    """Pinned version per policy (evaluation, past opponents); a policy not named: the newest."""
    version_choice: float = 0.0
    """In [0, 1]: chance that a turn is sampled by an older version that the engine holds, drawn from the turn's seed;
    where it holds none, or a version is pinned, nothing changes. Spans say what sampled, the staleness bound holds."""
    roles: dict[str, str] = {}
    """Role → policy; empty: as the recipe says."""

    @property
    def id(self) -> str:
        return f"{self.group}/{self.index}/{self.attempt}"


class AdvantageRun(Record, frozen=True, kw_only=True, array_like=True):
    """Tokens ``[start, stop)`` of a row have advantage ``value``."""

    start: int
    stop: int
    value: float


class Row(Record, frozen=True, kw_only=True):
    """One trainable row of a batch: a sample, what of it may be trained, and with what advantage."""

    sample_id: str
    """``group/index/agent/n``"""
    use: int = 0
    """0 fresh, 1... replayed. (sample_id, use) is trained at most once in one surviving history."""
    tokens: Array
    """int32 [T]"""
    mask: Array
    """bool [T]: trained tokens, what data masks (stale, truncated, failed, not sampled) taken out."""
    logprobs: Array
    """float32 [T]: behaviour log-probs; replayed rows keep their first ones."""
    spans: tuple[Span, ...] = ()
    advantages: tuple[AdvantageRun, ...] = ()
    kind: SampleKind = SampleKind.RL
    pair: str | None = None


class Batch(Record, frozen=True, kw_only=True):
    """The groups of one optimiser step, frozen: re-issued with the same rows and bytes. ``failures``: of it, so far."""

    id: int
    policy: str
    version: int
    """The version that the step starts from; the step makes ``version + 1``."""
    trainer_epoch: int
    tokens: int
    """Denominator: trained tokens of the whole batch (mask True), all kinds."""
    sequences: int
    """Denominator: rows with at least one trained token."""
    rows: tuple[Row, ...]
    failures: int = 0


def _require_dtype(name: str, array: Array, dtype: type[np.generic]) -> None:
    if array.ndim != 1 or array.dtype != np.dtype(dtype):
        raise InvalidRecord(f"{name} must be {np.dtype(dtype)} [T], found {array.dtype} {list(array.shape)}")
