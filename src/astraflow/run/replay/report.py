"""The record of a run under other algorithms, as one JSON object and as lines for people."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from astraflow.dataflow.settings import RunSpec
from astraflow.run.config import Resolved, load_config
from astraflow.run.layout import RunFolder
from astraflow.run.replay.choices import chosen
from astraflow.run.replay.figures import Comparison, compared, figures_of, happened, signals_of
from astraflow.run.replay.record import Record, read_record
from astraflow.run.replay.rederive import require_repeatable
from astraflow.run.replay.rerun import Rerun, Unmade
from astraflow.run.run_db import open_run_db
from astraflow.run.spec import run_spec

SHOWN = 5


def replay(
    run: RunFolder, *, curate: str | None = None, keep: Sequence[str] = (), select: str | None = None
) -> dict[str, Any]:
    """Raises ConfigError for a run that cannot be repeated, or an algorithm that there is not."""
    resolved = load_config(run.path)
    changes = chosen(resolved.recipe, curate=curate, keep=keep, select=select)
    with open_run_db(run.database) as db:
        record = read_record(db, run.payloads)
        require_repeatable(record)
        return _report(run, resolved, record, changes)


def _report(run: RunFolder, resolved: Resolved, record: Record, changes: Mapping[str, Any]) -> dict[str, Any]:
    spec = run_spec(resolved, run.path.name)
    first = copy.deepcopy(spec.pipeline.state_dict())
    own = Rerun(spec, record).run()
    check = compared(own)
    # What was made is in no algorithm's memory: each pass begins from the first state.
    spec.pipeline.load_state_dict(first)
    passes = {"least": own}
    if changes:
        other = replace(spec, pipeline=replace(spec.pipeline, **changes))
        passes = {"least": _passed(other, record, "lost")}
        if any(slot.content is None for slot in passes["least"].slots.values()):
            passes["most"] = _passed(other, record, "useful")
    then = happened(record, spec, signals_of(own))
    now = {name: figures_of(each) for name, each in passes.items()}
    least = passes["least"]
    unmade = [slot for slot in least.slots.values() if slot.content is None]
    return {
        "run": str(run.path),
        "algorithms": {name: _names(changes[name]) for name in changes},
        "own": _comparison(check),
        "changed": _comparison(compared(least)) if changes else None,
        "never_made": {"groups": len(unmade), "episodes": sum(slot.size for slot in unmade), "of": len(least.slots)},
        "without_task": least.without_task,
        "rebuilt_groups": len(record.rebuilt),
        "policies": {
            policy: {
                "happened": then[policy].as_json(),
                "replayed": {name: figures[policy].as_json() for name, figures in now.items()},
            }
            for policy in spec.trainable
        },
    }


def _passed(spec: RunSpec, record: Record, unmade: Unmade) -> Rerun:
    """From the first state, whatever was asked of these objects before."""
    first = copy.deepcopy(spec.pipeline.state_dict())
    done = Rerun(spec, record, unmade=unmade).run()
    spec.pipeline.load_state_dict(first)
    return done


def _comparison(found: Comparison) -> dict[str, Any]:
    return {**asdict(found), "differences": list(found.differences), "same": found.same}


def _names(algorithms: Any) -> str:
    if isinstance(algorithms, tuple):
        return ", ".join(type(each).__name__ for each in algorithms) or "none"
    return type(algorithms).__name__


# ── for people ──

ROWS = (
    ("steps", "steps"),
    ("groups opened", "groups"),
    ("episodes of them", "episodes"),
    ("  per step", "episodes_per_step"),
    ("groups kept", "kept"),
    ("  episodes for each", "episodes_per_kept"),
    ("episodes trained", "episodes_trained"),
    ("groups with signal", "with_signal"),
    ("  of the trained", "trained_with_signal"),
    ("groups replayed", "replayed"),
    ("stale groups", "stale"),
    ("staleness, mean", "staleness"),
    ("staleness, max", "staleness_max"),
)
REASONS = (("dropped", "dropped"), ("samples masked", "masked"))
SHARES = ("with_signal", "trained_with_signal")


def report_lines(report: Mapping[str, Any]) -> list[str]:
    own, changed, unmade = report["own"], report["changed"], report["never_made"]
    lines = [_own_line(own), *_some(own["differences"])]
    if changed is not None:
        what = ", ".join(f"{place}={name}" for place, name in report["algorithms"].items())
        lines.append(f"with {what}: {len(changed['differences'])} decisions or their outcomes differ")
    if unmade["groups"]:
        lines.append(
            f"never made: {unmade['groups']} of the {unmade['of']} groups that were asked for, {unmade['episodes']} "
            "episodes; figures are bounds: none of them of any use … all of them with a signal"
        )
    if report["without_task"]:
        lines.append(f"no task: {report['without_task']} times, as the tasks were used up")
    if report["rebuilt_groups"]:
        lines.append(f"rebuilt: {report['rebuilt_groups']} groups whose bytes are pruned, from their episodes' scores")
    for policy, found in report["policies"].items():
        lines += ["", *_table(policy, found)]
    return lines


def _own_line(own: Mapping[str, Any]) -> str:
    counts = f"{own['admissions']} admissions, {own['verdicts']} verdicts, {own['batches']} batches"
    if own["masks"]:
        counts += f", {own['masks']} samples masked"
    if own["same"]:
        return f"its own algorithms decide again as recorded: {counts}"
    return f"its own algorithms do NOT decide as recorded ({counts}): {len(own['differences'])} differences"


def _some(differences: Sequence[str]) -> list[str]:
    more = [f"  and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    return [f"  {each}" for each in differences[:SHOWN]] + more


def _table(policy: str, found: Mapping[str, Any]) -> list[str]:
    then, passes = found["happened"], list(found["replayed"].values())
    rows = [(title, _word(name, then[name]), _range(name, [each[name] for each in passes])) for title, name in ROWS]
    rows += [
        (
            f"{title}, {reason}",
            _word("", then[name].get(reason, 0)),
            _range("", [each[name].get(reason, 0) for each in passes]),
        )
        for title, name in REASONS
        for reason in sorted({reason for each in (then, *passes) for reason in each[name]})
    ]
    widths = [max(len(row[column]) for row in [*rows, (policy, "happened", "")]) for column in (0, 1)]
    head = (policy, "happened", "replayed")
    return [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}" for a, b, c in (head, *rows)]


def _range(name: str, values: Sequence[Any]) -> str:
    words = list(
        dict.fromkeys(_word(name, each) for each in sorted(values, key=lambda each: (each is None, each or 0)))
    )
    return " … ".join(words)


def _word(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
