"""Rules for the whole suite: one torch thread a test, and no silent skips in CI."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine makes no example slow by itself: pytest's own timeout ends what hangs.
settings.register_profile("astraflow", deadline=None, suppress_health_check=(HealthCheck.too_slow,))
settings.load_profile("astraflow")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ALLOWED_SKIP = "needs hardware:"


@pytest.fixture(scope="session")
def repo() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path, None, None]:
    """A disk of 24 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=False)
    if mounted.returncode != 0:
        pytest.skip("needs hardware: a user who may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """In CI a skip is a failure: a promise nobody checked. Hardware that CI cannot have is the only excuse."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    longrepr = report.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    reason = reason.removeprefix("Skipped: ").strip()
    if not reason.startswith(ALLOWED_SKIP):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {reason!r}; only reasons that start with {ALLOWED_SKIP!r} may skip"
