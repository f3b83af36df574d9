"""What is left of a run for people: summary.json, curve.png, the text that ends ``astraflow run``. Read from run.db."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.observe.curve import Points, save_curve, text_curve
from astraflow.run.config import Resolved
from astraflow.run.held_out_roles import held_out_by_role
from astraflow.run.layout import RunFolder, write_json
from astraflow.run.ledger import ledger_lines, ledger_report
from astraflow.run.run_db import RunDb, open_run_db
from astraflow.run.samples import Pair, answer_pairs

SMOOTH = 5
HELD_OUT = "held-out "
SCORE = f"{HELD_OUT}accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Everything that the last screen shows."""

    summary: dict[str, Any]
    lines: dict[str, Points]
    pairs: Sequence[Pair]
    ledger: dict[str, Any]


def finish_run(run: RunFolder, resolved: Resolved, *, wall_s: float | None) -> Ending:
    """Write summary.json and curve.png; may be done again at any time."""
    with open_run_db(run.database) as db:
        lines = _lines(db)
        if len(resolved.recipe.casting) > 1:
            lines |= role_lines(lines.get(SCORE, ()), held_out_by_role(db, run.payloads))
        pairs = answer_pairs(db, run, resolved.recipe)
        summary = _summary(db, wall_s)
    ledger = ledger_report(run)
    summary["ledger_difference"] = ledger["difference"]
    write_json(run.summary, summary)
    save_curve(run.curve, lines, title=run.name)
    return Ending(summary=summary, lines=lines, pairs=pairs, ledger=ledger)


def _summary(db: RunDb, wall_s: float | None) -> dict[str, Any]:
    steps, evaluations = db.steps(), db.evaluations()
    by_policy: dict[str, int] = {}
    for step in steps:
        by_policy[step.policy] = max(step.step, by_policy.get(step.policy, 0))
    rl_wall_s = db.span().rl_wall_s
    return {
        "steps": min(by_policy.values(), default=0),
        "accuracy_before": evaluations[0].score if evaluations else None,
        "accuracy_after": evaluations[-1].score if evaluations else None,
        "rl_wall_s": rl_wall_s if rl_wall_s is None else round(rl_wall_s, 3),
        "wall_s": wall_s if wall_s is None else round(wall_s, 3),
        "ledger_difference": 0,
    }


def _lines(db: RunDb) -> dict[str, Points]:
    steps = db.steps()
    policies = sorted({step.policy for step in steps})
    lines: dict[str, Points] = {}
    for policy in policies:
        own = [step for step in steps if step.policy == policy]
        rewards = [(float(step.step), step.reward) for step in own if step.reward is not None]
        lines["training reward" if len(policies) == 1 else f"reward {policy}"] = _smooth(rewards)
    evaluations = db.evaluations()
    if evaluations:
        lines[SCORE] = [(float(found.version), found.score) for found in evaluations]
    return lines


def role_lines(score: Points, by_role: Mapping[str, Points]) -> dict[str, Points]:
    """Of roles whose reward is not the episode's: that one has its line already."""
    return {f"{HELD_OUT}{role}": points for role, points in by_role.items() if not set(points) <= set(score)}


def _smooth(points: Sequence[tuple[float, float]]) -> Points:
    """Mean of the last few; the reader sees the trend, metrics.jsonl has the values."""
    window = [points[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(points))]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in window]


def ending_lines(run: RunFolder, ending: Ending, policies: Sequence[str]) -> list[str]:
    """The last screen."""
    summary = ending.summary
    out = ["", *text_curve(ending.lines).splitlines(), ""]
    for pair in ending.pairs:
        out += [f"  {pair.question}", f"    before: {pair.before!r}", f"    after:  {pair.after!r}"]
    if ending.pairs:
        out.append("")
    out += accuracy_lines(ending.lines)
    took = "" if summary["rl_wall_s"] is None else f" in {summary['rl_wall_s']:.0f} s of reinforcement learning"
    out.append(f"steps              {summary['steps']}{took}")
    out.append(f"ledger             {ledger_line(ending.ledger)}")
    out.append(f"curve              {run.curve}")
    command = how_to_call()
    which = "" if len(policies) == 1 else f" --policy {policies[0]}" if policies else ""
    calls = {
        f"{command} models export {run.path}{which} my-model": "a folder that from_pretrained loads",
        f"{command} ledger {run.path}": "where every episode went",
        f"{command} trace {run.path} 1/0": "the journey of one episode",
    }
    width = max(len(call) for call in calls)
    return [*out, "", "next:", *(f"  {call.ljust(width)}    # {what}" for call, what in calls.items())]


def accuracy_lines(lines: Mapping[str, Points]) -> list[str]:
    """First and last evaluation of the score, and of each role that has a line."""
    held_out = {name: points for name, points in lines.items() if name.startswith(HELD_OUT)}
    return [f"{name:<18} {points[0][1]:.3f} → {points[-1][1]:.3f}" for name, points in held_out.items()]


def how_to_call() -> str:
    """``astraflow`` where a shell finds it, else as this process was called: ``.venv/bin/astraflow``."""
    called = sys.argv[0]
    return called if Path(called).name == "astraflow" and shutil.which("astraflow") is None else "astraflow"


def ledger_line(ledger: dict[str, Any]) -> str:
    verdict = "balances" if ledger["difference"] == 0 else f"is off by {ledger['difference']}"
    return f"{verdict}: {ledger_lines(ledger)[0].removeprefix('episodes  ')}"
