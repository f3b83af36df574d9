"""The benchmark of the engine measures what it says: fixed lengths, distinct prompts, only wanted tokens."""

from __future__ import annotations

from pathlib import Path

from astraflow.run.bench.engine import make_work, run
from astraflow.run.tiny_model import TinyModel


def test_work_is_fixed_by_the_seed_and_shares_no_beginning(tmp_path: Path) -> None:
    folder = TinyModel(hidden=64, layers=2).build(tmp_path / "tiny")
    work = make_work(folder, requests=64, seed=1, lengths=(8, 128))
    again = make_work(folder, requests=64, seed=1, lengths=(8, 128))
    assert work.lengths == again.lengths and all(map((lambda a, b: (a == b).all()), work.prompts, again.prompts))
    assert len({int(prompt[0]) for prompt in work.prompts}) == 64
    assert min(work.lengths) >= 8 and max(work.lengths) <= 128
    assert set(make_work(folder, requests=8, seed=1, lengths=(64, 64)).lengths) == {64}


def test_it_runs_on_a_tiny_model_and_names_its_figures(tmp_path: Path) -> None:
    folder = TinyModel(hidden=64, layers=2).build(tmp_path / "tiny")
    found = run(model_dir=folder, requests=8, slots=4, threads=1, batches=(4,), dtype="float32")
    for suffix in ("", "_equal_lengths"):
        assert (
            found[f"ratio{suffix}"] == found[f"engine_tokens_per_s{suffix}"] / found[f"generate_tokens_per_s{suffix}"]
        )
        assert found[f"engine_tokens_per_s{suffix}"] > 0
