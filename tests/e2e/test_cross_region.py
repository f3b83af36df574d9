"""The example of three regions as a user runs it: processes on hosts of their own, lines with delay, loss and a cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from astraflow.testing.hosts import missing

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cross_region.py"
pytestmark = pytest.mark.slow


def test_three_regions_a_relay_and_a_cut(environment: dict[str, str]) -> None:
    """The third region is away for a while; nothing is lost, and the run ends."""
    if os.geteuid() == 0 and (which("ip") is None or which("tc") is None):
        subprocess.run(["apt-get", "install", "-y", "iproute2"], check=True, capture_output=True, timeout=100)
    if reason := missing():
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "36", "--cut-s", "2"],
        env=environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert any(row[:3] == ["eu-0", "eu", "(relay)"] for row in rows), done.stdout
    assert any(row[:2] == ["eu-1", "eu"] and row[2] == "main" for row in rows), done.stdout
    assert any(row[:2] == ["us-0", "us"] for row in rows), done.stdout
    (played,) = [line for line in done.stdout.splitlines() if line.startswith("episodes that were accepted:")]
    assert all(f" {name} " in played for name in ("home-0", "eu-0", "eu-1", "us-0")), played
    assert "the ledger balances" in done.stdout, done.stdout
