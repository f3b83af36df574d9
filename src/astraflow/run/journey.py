"""One episode from admission to commit, as the events tell it, and what was said in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from astraflow.errors import NotFound
from astraflow.observe.terminal import harmless, visible
from astraflow.run.layout import RunFolder
from astraflow.run.recipe import Recipe
from astraflow.run.run_db import open_run_db
from astraflow.run.samples import tokenizer_of
from astraflow.types import Episode, Sample, Trajectory

SAMPLED, GIVEN, OFF = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_PLACES = ("id", "at_s", "kind", "group", "index")
_LONG = ("metrics", "groups")


@dataclass(frozen=True, kw_only=True, slots=True)
class Journey:
    group: int
    index: int
    about: dict[str, Any]
    """Of the group: purpose, task, state per policy."""
    events: list[dict[str, Any]]
    episode: Episode | None
    """None: not stored, or pruned since."""
    known: dict[str, Any]
    """What the tables say of it: state, outcome, score, samples."""
    pruned: dict[str, Any] | None = None
    """When its bytes went: at_s, and of the whole group how many episodes and bytes."""
    joined: dict[str, str] = field(default_factory=dict)
    """Policies that joined the run → which of the recipe each is like."""

    def lines(self) -> Iterator[str]:
        yield f"episode {self.group}/{self.index}: {self.about['purpose']}, task {self.about['task']!r}"
        start = self.events[0]["at_s"] if self.events else 0.0
        for event in self.events:
            about = {k: v for k, v in event.items() if k not in _PLACES and k not in _LONG and v is not None}
            words = "  ".join(f"{key}={_short(value)}" for key, value in about.items())
            yield f"  {event['at_s']:9.3f} s  +{event['at_s'] - start:8.3f}  {event['kind']:<10} {words}".rstrip()
        for policy in self.about["policies"]:
            known = {name: value for name, value in policy.items() if value is not None and name != "policy"}
            yield f"  policy {policy['policy']}: " + "  ".join(f"{k}={_short(v)}" for k, v in known.items())

    def as_json(self) -> dict[str, Any]:
        stored = None if self.episode is None else _plain(self.episode)
        return {
            "group": self.group,
            "index": self.index,
            **self.about,
            "events": self.events,
            "known": self.known,
            "pruned": self.pruned,
            "episode": stored,
        }


def journey_of(run: RunFolder, group: int, index: int) -> Journey:
    """Raises NotFound for an episode that was never admitted."""
    with open_run_db(run.database) as db:
        about = db.group(group)
        if index >= about["size"]:
            raise NotFound(f"group {group} has episodes 0 to {about['size'] - 1}, asked for {index}")
        events = [event for event in db.events_of(group) if event.get("index", index) == index]
        return Journey(
            group=group,
            index=index,
            about=about,
            events=events,
            episode=db.episode(group, index, run.payloads),
            known=db.known(group, index),
            pruned=db.pruned(group),
            joined=db.joined(),
        )


def text_lines(journey: Journey, recipe: Recipe, *, colour: bool) -> Iterator[str]:
    """Every sample: what was given is dim (or plain), what a policy sampled is green (or in ⟦ ⟧), with its version."""
    if journey.episode is None:
        yield from _without_text(journey)
        return
    episode = journey.episode
    score = "" if episode.score is None else f", score {episode.score:g}"
    yield harmless(f"outcome {episode.outcome}{score}" + (f": {episode.error}" if episode.error else ""))
    for trajectory in episode.trajectories:
        rewards = ", ".join("not scored" if turn.reward is None else f"{turn.reward:g}" for turn in trajectory.turns)
        tokenizer = tokenizer_of(recipe, journey.joined.get(trajectory.policy, trajectory.policy))
        for number, sample in enumerate(trajectory.samples):
            yield ""
            yield (
                f"agent {trajectory.agent} (policy {trajectory.policy}{_place(trajectory)}), sample {number}, "
                f"rewards by turn: {rewards}"
            )
            yield _text(sample, tokenizer, colour=colour)


def _place(trajectory: Trajectory) -> str:
    """In the tree of agents: below which turn, and which turns are its own where there are others."""
    parent = trajectory.turns[0].parent if trajectory.turns else None
    own = ", ".join(str(turn.index) for turn in trajectory.turns)
    return f", turn{'s' if len(trajectory.turns) > 1 else ''} {own}" + (
        "" if parent is None else f" below turn {parent}"
    )


def _without_text(journey: Journey) -> Iterator[str]:
    """Why there is none, and what metadata still tell."""
    known, pruned = journey.known, journey.pruned
    if pruned is None:
        yield f"nothing of it is stored: it is {known['state']}"
        return
    yield (
        f"pruned at {pruned['at_s']:.3f} s with its group ({pruned['episodes']} episodes, {pruned['bytes']} bytes): "
        "every checkpoint that is kept covers it"
    )
    score = "" if known["score"] is None else f", score {known['score']:g}"
    yield f"outcome {known['outcome'] or known['kind']}{score}, attempt {known['attempt']} on {known['worker']}"
    for sample in known["samples"]:
        version = "" if sample["min_version"] is None else f", oldest version {sample['min_version']}"
        age = "" if sample["age"] is None else f" at age {sample['age']}"
        why = "" if sample["mask"] is None else f" ({sample['mask']})"
        yield (
            f"agent {sample['agent']} (policy {sample['policy']}), sample {sample['n']}: {sample['tokens']} tokens "
            f"sampled{version}, {sample['state']}{why}{age}"
        )


def _text(sample: Sample, tokenizer: Tokenizer | None, *, colour: bool) -> str:
    edges = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(sample.sampled))), len(sample.tokens)]
    parts = []
    for start, stop in pairwise(edges):
        ids = sample.tokens[start:stop].tolist()
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
        text = visible(text)
        if not sample.sampled[start]:
            parts.append(f"{GIVEN}{text}{OFF}" if colour else text)
            continue
        versions = sorted({span.version for span in sample.spans if span.start < stop and span.stop > start})
        label = f"[v{'-'.join(map(str, versions))}]" if versions else ""
        parts.append(f"{SAMPLED}{text}{OFF}{label}" if colour else f"⟦{text}⟧{label}")
    return "".join(parts)


def _plain(value: Any) -> Any:
    def hook(item: Any) -> Any:
        return item.tolist() if isinstance(item, np.ndarray) else str(item)

    return msgspec.to_builtins(value, enc_hook=hook)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:80]
