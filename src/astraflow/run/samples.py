"""Answers to the same held-out tasks at the first and at the last evaluated version, as text."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from astraflow.run.checks import existing_folder
from astraflow.run.layout import RunFolder
from astraflow.run.recipe import Recipe
from astraflow.run.run_db import RunDb
from astraflow.types import Episode, Sample

SHOWN = 3
LONGEST = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    question: str
    before: str
    after: str


def answer_pairs(db: RunDb, run: RunFolder, recipe: Recipe) -> list[Pair]:
    """Up to three; none when nothing was evaluated twice."""
    evals = db.connection.execute("SELECT id FROM evals WHERE state = 'done' ORDER BY version, id").fetchall()
    if len(evals) < 2:
        return []
    rows = db.connection.execute(
        "SELECT a.id, b.id FROM groups a JOIN groups b ON a.task_key = b.task_key "
        "WHERE a.eval_id = ? AND b.eval_id = ? ORDER BY a.id LIMIT ?",
        (evals[0][0], evals[-1][0], SHOWN),
    ).fetchall()
    pairs, joined = [], db.joined()
    for first, last in rows:
        before, after = (db.episode(group, 0, run.payloads) for group in (first, last))
        if before is None or after is None or not before.trajectories or not after.trajectories:
            continue
        policy = before.trajectories[0].policy
        tokenizer = tokenizer_of(recipe, joined.get(policy, policy))
        if tokenizer is not None:
            pairs.append(
                Pair(
                    question=_question(tokenizer, before),
                    before=_answer(tokenizer, before),
                    after=_answer(tokenizer, after),
                )
            )
    return pairs


def tokenizer_of(recipe: Recipe, policy: str) -> Tokenizer | None:
    """``policy``: one of the recipe."""
    folder = existing_folder(recipe.policies[policy]) or recipe.policies[policy].folder()
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.exists() else None


def _first(episode: Episode) -> Sample:
    return episode.trajectories[0].samples[0]


def _question(tokenizer: Tokenizer, episode: Episode) -> str:
    """The end of the prompt: the last thing that was said to the model."""
    sample = _first(episode)
    prompt = sample.tokens[: int(sample.sampled.argmax())].tolist()
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    special = sorted({token.content for token in tokenizer.get_added_tokens_decoder().values()}, key=len, reverse=True)
    for token in special:
        text = text.replace(token, "\0")
    parts = [part.strip() for part in text.split("\0") if part.strip()]
    said = parts[-2] if len(parts) > 1 and parts[-1] == "assistant" else parts[-1] if parts else ""
    return said.removeprefix("user\n").strip().replace("\n", " ")[-LONGEST:]


def _answer(tokenizer: Tokenizer, episode: Episode) -> str:
    sample = _first(episode)
    return str(tokenizer.decode(sample.tokens[sample.sampled].tolist()))[:LONGEST]
