"""What every trainer backend must do. ``check_backend(make, batches, folder)`` raises AssertionError with the reason.

def test_mine(tmp_path): check_backend(lambda: MyBackend(model_dir), make_batches(), tmp_path)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from astraflow.trainer.backend import Backend
from astraflow.types import AdvantageRun, Batch
from astraflow.weights.digest import digest_files


def check_backend(make: Callable[[], Backend], batches: Sequence[Batch], folder: Path) -> None:
    """``make`` gives a backend at version 0, always with the same weights. ``batches``: three with signal; their
    versions are filled in here. ``folder``: empty, for exports and checkpoints."""
    assert len(batches) >= 3, "three batches are needed"
    steps = [msgspec.structs.replace(batch, version=n) for n, batch in enumerate(batches[:3])]
    _check_steps(make, steps, folder)
    _check_nothing_to_learn(make, steps, folder)
    _check_resume(make, steps, folder)


def _check_steps(make: Callable[[], Backend], steps: Sequence[Batch], folder: Path) -> None:
    backend = make()
    assert backend.version == 0, f"a new backend is at version 0, found {backend.version}"
    digests = [_exported(backend, folder / "0")]
    for n, batch in enumerate(steps):
        report = backend.step(batch)
        assert report.updated and report.reason is None, f"step {n + 1} should update, found {report.reason}"
        assert backend.version == n + 1, f"step {n + 1} makes version {n + 1}, found {backend.version}"
        expected = {(row.sample_id, row.use) for row in batch.rows if row.mask.any()}
        assert set(report.trained) == expected, "trained names every (sample_id, use) with a trained token"
        assert len(report.trained) == len(expected), "trained names each row once"
        assert all(math.isfinite(value) for value in report.metrics.values()), f"metrics: {report.metrics}"
        digests.append(_exported(backend, folder / str(n + 1)))
    assert len(set(digests)) == len(digests), "every step changes the weights"
    again = make()
    for batch in steps:
        again.step(batch)
    assert again.digest() == digests[-1], "the same batches in the same order give the same bits"
    again.close()
    backend.close()


def _check_nothing_to_learn(make: Callable[[], Backend], steps: Sequence[Batch], folder: Path) -> None:
    """F52: no signal, nothing at all, or not finite: weights, version and what the next step does stay as they are."""
    plain, disturbed = make(), make()
    plain.step(steps[0])
    disturbed.step(steps[0])
    before = disturbed.digest()
    for batch, reason in (
        (with_advantage(steps[1], 0.0), "no_signal"),
        (msgspec.structs.replace(steps[1], rows=(), tokens=0, sequences=0), "no_signal"),
        (with_advantage(steps[1], math.nan), "non_finite"),
    ):
        report = disturbed.step(batch)
        assert not report.updated and report.reason == reason, f"expected {reason}, found {report}"
        assert report.trained == (), "nothing was trained"
        assert (disturbed.version, disturbed.digest()) == (1, before), f"{reason} must touch nothing"
    plain.step(steps[1])
    disturbed.step(steps[1])
    assert plain.digest() == disturbed.digest(), "a step that was none changes the next one"
    plain.close()
    disturbed.close()


def _check_resume(make: Callable[[], Backend], steps: Sequence[Batch], folder: Path) -> None:
    """F68: save, load, step is step, bit for bit."""
    backend, extra = make(), {"note": ["plain", 1, None]}
    backend.step(steps[0])
    backend.step(steps[1])
    saved = folder / "saved"
    saved.mkdir()
    backend.save(saved, extra)
    resumed = make()
    assert resumed.load(saved) == extra, "extra comes back as it was"
    assert (resumed.version, resumed.digest()) == (2, backend.digest()), "load gives what was saved"
    first, second = backend.step(steps[2]), resumed.step(steps[2])
    assert first == second, f"reports differ after a load: {first} {second}"
    assert backend.digest() == resumed.digest(), "the step after a load is the step without it, bit for bit"
    backend.close()
    resumed.close()


def _exported(backend: Backend, folder: Path) -> str:
    """The digest, after checking that the exported files have it."""
    folder.mkdir(parents=True)
    files = backend.export(folder)
    digest = backend.digest()
    assert sorted(files) == sorted(folder.iterdir()), "export names the files that it wrote"
    assert digest_files(files) == digest, "digest() is that of the exported files"
    return digest


def with_advantage(batch: Batch, value: float) -> Batch:
    """The same batch with one advantage everywhere."""
    rows = tuple(
        msgspec.structs.replace(
            row, advantages=tuple(AdvantageRun(start=r.start, stop=r.stop, value=value) for r in row.advantages)
        )
        for row in batch.rows
    )
    return msgspec.structs.replace(batch, rows=rows)
