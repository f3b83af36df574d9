"""Where everything that was admitted is, for people and scripts; the counting itself is dataflow's ``balance``."""

from __future__ import annotations

from typing import Any

from astraflow.dataflow.conservation import balance
from astraflow.dataflow.verify import verify
from astraflow.run.layout import RunFolder
from astraflow.run.replay.rederive import WHAT, Rederived, rederive
from astraflow.run.run_db import open_run_db

UNTOLD = f"{WHAT}, made again from the decisions: where tables are not what the events tell, no past can be repeated"


def ledger_report(run: RunFolder) -> dict[str, Any]:
    """``difference``: the absolute sum of what does not add up; 0 is balanced. Dropped groups come with reasons."""
    with open_run_db(run.database) as db:
        report = balance(db.connection)
        reasons = db.connection.execute(
            "SELECT policy, COALESCE(reason, 'unknown'), COUNT(*) FROM group_policy WHERE state = 'dropped' "
            "GROUP BY policy, reason"
        ).fetchall()
        given_up = db.connection.execute(
            "SELECT COALESCE(kind, 'unknown'), COUNT(*) FROM episodes WHERE state = 'given_up' GROUP BY kind"
        ).fetchall()
    dropped: dict[str, dict[str, int]] = {}
    for policy, reason, count in reasons:
        dropped.setdefault(policy, {})[reason] = count
    return {**report, "dropped": dropped, "given_up": dict(given_up)}


def ledger_lines(report: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [f"episodes  {_sum(report['episodes'], 'admitted')}{_why(report['given_up'])}"]
    for name, counts in report["policies"].items():
        lines.append(f"groups    {name}: {_sum(counts, 'admitted')}{_why(report['dropped'].get(name, {}))}")
    lines.append(f"samples   {_sum(report['samples'], 'stored')}")
    verdict = "balances" if report["difference"] == 0 else f"does NOT balance: difference {report['difference']}"
    return [*lines, f"the ledger {verdict}"]


def verification(run: RunFolder) -> dict[str, Any]:
    """``verified``: every state follows from the events, and what the algorithms know from the decisions; else
    ``differences``, each in words."""
    with open_run_db(run.database) as db:
        found = verify(db.connection, run.payloads)
    again = Rederived(not_compared=(UNTOLD,)) if found.differences else rederive(run)
    differences = [*found.differences, *again.differences]
    return {
        "verified": not differences,
        "differences": differences,
        "events": found.events,
        "rows": found.rows,
        "decisions": again.decisions,
        "not_compared": [*found.not_compared, *again.not_compared],
    }


def verification_lines(found: dict[str, Any]) -> list[str]:
    """For people: each difference, and the verdict."""
    compared = f"{found['events']} events, {found['rows']} rows"
    if found["decisions"]:  # none was made again where nothing could be, which is said in a line of its own
        compared += f", {found['decisions']} decisions made again"
    count = len(found["differences"])
    verdict = (
        f"verified: {compared} tell the same" if found["verified"] else f"NOT verified: {compared}, {count} differ"
    )
    return [*found["differences"], *(f"not compared: {what}" for what in found["not_compared"]), verdict]


def _sum(counts: dict[str, int], total: str) -> str:
    parts = " + ".join(f"{n} {state}" for state, n in counts.items() if state != total and n)
    return f"{counts[total]} {total} = {parts or 0}"


def _why(reasons: dict[str, int]) -> str:
    return f" ({', '.join(f'{reason} {n}' for reason, n in sorted(reasons.items()))})" if reasons else ""
