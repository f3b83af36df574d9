"""The pool of workers in lines: who is where, at which version, how fast, how stale, and why not. For people."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.observe.terminal import harmless
from astraflow.wire.messages import PoolReply, PoolTarget, PoolWorker

GONE_S = 600.0
"""Workers that have left or died are shown for so long."""
HEAD = ("worker", "region", "versions", "behind", "tokens/s", "episodes/s", "held", "staleness of what it sent", "")


def pool_lines(pool: PoolReply) -> list[str]:
    """A table, and how many workers there should be."""
    shown = [each for each in pool.workers if each.state == "alive" or each.heard_s < GONE_S]
    rows = [HEAD, *(_row(each) for each in sorted(shown, key=lambda each: (each.state != "alive", each.name)))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    lines = [f"run {pool.run}: {pool.state}"]
    if not shown:
        lines.append("no worker is there")
    else:
        lines += [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in rows
        ]
    return [harmless(line) for line in (*lines, target_line(pool.target))]


def target_line(target: PoolTarget) -> str:
    """``4 workers serve, 6 should (grow: the trainer waits 30% of its time)``"""
    what = f"{target.workers} workers serve, {target.target} should"
    if target.workers == target.target:
        what = f"{target.workers} workers serve, as they should"
    return f"{what} ({target.action}: {target.reason})"


def _row(worker: PoolWorker) -> tuple[str, ...]:
    relay = " (relay)" if worker.relay else ""
    behind = max(worker.lag.values(), default=0)
    stale = "" if worker.reason else worker.stale
    traffic = _traffic(worker.metrics)
    return (
        worker.name,
        (worker.region or "-") + relay,
        " ".join(f"{policy} v{version}" for policy, version in sorted(worker.versions.items())) or "-",
        str(behind) if worker.versions else "-",
        _number(worker.tokens_per_s),
        _number(worker.episodes_per_s),
        str(worker.held),
        " ".join(f"{age}:{count}" for age, count in sorted(worker.staleness.items(), key=_age)) or "-",
        "; ".join(part for part in (worker.reason and f"does not serve: {worker.reason}", stale, traffic) if part),
    )


def _traffic(metrics: Mapping[str, float]) -> str:
    dropped, refused = metrics.get("relay/dropped", 0.0), metrics.get("weights/refused", 0.0)
    parts = [
        f"dropped {dropped:.0f} relays that served wrong bytes" if dropped else "",
        f"refused what its engine held {refused:.0f} times" if refused else "",
        _weights(metrics),
    ]
    return "; ".join(part for part in parts if part)


def _weights(metrics: Mapping[str, float]) -> str:
    """``weights: 1.2 MB in 0.4 s, decoded 0.1 s, applied 0.2 s, proved 0.1 s, paused 3 ms``: all of them so far."""
    if "weights/load_s" not in metrics:
        return ""

    def of(name: str) -> float:
        # What came by way of relays and of the origin is told apart; what is not, as one.
        parts = [value for key, value in metrics.items() if key.startswith(f"weights/{name}/")]
        return sum(parts) if parts else metrics.get(f"weights/{name}", 0.0)

    return (
        f"weights: {of('bytes') / 1e6:.3g} MB in {of('download_s'):.3g} s, decoded {of('decode_s'):.3g} s, "
        f"applied {of('load_s'):.3g} s, proved {of('attest_s'):.3g} s, paused {of('pause_s') * 1e3:.3g} ms"
    )


def _age(item: tuple[str, int]) -> int:
    return int(item[0])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
