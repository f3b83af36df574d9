"""A moving average of versions by its formula, in float32 between versions, in the files' own dtype outside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from astraflow.errors import WeightsRefused
from astraflow.weights.average import MovingAverage, of_float, to_float
from astraflow.weights.tensors import read_tensors


def weights(folder: Path, name: str, values: Sequence[float], dtype: torch.dtype = torch.float32) -> list[Path]:
    path = folder / name / "model.safetensors"
    path.parent.mkdir()
    save_file({"a": torch.tensor(values, dtype=dtype).reshape(1, -1), "b": torch.ones(2, dtype=dtype)}, path)
    return [path]


def written(average: MovingAverage, like: list[Path], folder: Path) -> torch.Tensor:
    folder.mkdir()
    (path,) = average.write(like, folder)
    return load_file(path)["a"].reshape(-1)


def test_each_version_counts_by_the_formula(tmp_path: Path) -> None:
    first, second = weights(tmp_path, "1", [1.0, 0.0]), weights(tmp_path, "2", [0.0, 8.0])
    average = MovingAverage(0.75)
    average.begin(0, weights(tmp_path, "0", [0.0, 0.0]))
    average.take(1, first)
    average.take(2, second)
    assert written(average, second, tmp_path / "out").tolist() == [0.1875, 2.0]


def test_versions_that_nobody_saw_count_as_the_one_that_was_seen(tmp_path: Path) -> None:
    new = weights(tmp_path, "3", [1.0])
    average = MovingAverage(0.5)
    average.begin(0, weights(tmp_path, "0", [0.0]))
    average.take(3, new)
    assert written(average, new, tmp_path / "a").tolist() == [1 - 0.5**3]
    back = MovingAverage(0.5)
    back.begin(7, weights(tmp_path, "7", [0.0]))
    back.take(3, new)  # it was rolled back: one version more
    assert (back.version, written(back, new, tmp_path / "b").tolist()) == (3, [0.5])


def test_small_steps_arrive_although_bf16_could_not_hold_any_of_them(tmp_path: Path) -> None:
    start, end = (weights(tmp_path, name, [value], torch.bfloat16) for name, value in (("0", 1.0), ("1", 1.0078125)))
    average = MovingAverage(0.99)
    average.begin(0, start)
    for version in range(1, 400):
        average.take(version, end)
    assert written(average, end, tmp_path / "out").tolist() == [1.0078125]


def test_another_life_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    steps = [weights(tmp_path, str(n), [float(n * n)], torch.bfloat16) for n in range(4)]
    whole, part = MovingAverage(0.9), MovingAverage(0.9)
    for each in (whole, part):
        each.begin(0, steps[0])
        each.take(1, steps[1])
    part.save(tmp_path / "state")
    again = MovingAverage(0.9)
    assert again.load(tmp_path / "state") and again.version == 1
    for version in (2, 3):
        whole.take(version, steps[version])
        again.take(version, steps[version])
    assert written(whole, steps[3], tmp_path / "w").equal(written(again, steps[3], tmp_path / "a"))
    assert not MovingAverage(0.9).load(tmp_path / "nothing")


def test_weights_of_another_model_are_refused_and_change_nothing(tmp_path: Path) -> None:
    own = weights(tmp_path, "0", [1.0, 2.0])
    average = MovingAverage(0.5)
    average.begin(0, own)
    with pytest.raises(WeightsRefused, match="version 1 has other tensors"):
        average.take(1, weights(tmp_path, "1", [1.0, 2.0, 3.0]))
    assert (average.version, written(average, own, tmp_path / "out").tolist()) == (0, [1.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_are_rounded_as_torch_rounds_them(tmp_path: Path, dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.from_numpy(values).to(dtype)}, path)
    (tensor,) = read_tensors(path)
    assert np.array_equal(to_float(tensor), torch.from_numpy(values).to(dtype).float().numpy())
    assert np.array_equal(of_float(values, tensor), tensor.data)


def test_what_is_no_float_has_no_average(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(2, dtype=torch.int64)}, path)
    with pytest.raises(WeightsRefused, match="x is I64: only floats"):
        MovingAverage(0.5).begin(0, [path])
