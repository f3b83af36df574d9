"""The bench of weights, on a few small tensors: its figures are what they are called."""

from __future__ import annotations

import asyncio
import sqlite3
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from astraflow.errors import ConfigError
from astraflow.run.bench import _codec as codec
from astraflow.run.bench import _pools
from astraflow.run.bench import weights as bench
from astraflow.run.bench._adam import SPREAD, Weights, bf16_weights, published, simulated
from astraflow.run.bench._catch_up import catch_up
from astraflow.run.tiny_model import TinyModel
from astraflow.weights.chain import Chain
from astraflow.weights.delta import bits_of
from astraflow.weights.digest import digest_files
from astraflow.weights.manifest import weight_files_in
from astraflow.weights.publish import Publisher
from astraflow.weights.settings import WeightSettings
from astraflow.weights.store import DirStore
from astraflow.weights.tensors import of_array
from astraflow.wire.codec import encode
from tests.unit.weights.arrays import bf16

KEYS = {"changed", "bytes_per_changed", "entropy_bytes_per_changed", "ratio", "plain_ratio", "whole_share"}


def some(size: int = 60_000) -> Weights:
    rng = np.random.default_rng(0)
    return {name: of_array(name, bf16(rng.normal(size=size) * 0.02), dtype="BF16") for name in ("a", "b")}


def test_entropy_of_what_is_known() -> None:
    assert codec.entropy_bits(10, np.empty(0, np.int16)) == 0
    # half of 100 elements: one bit for each place, and one for each of two equally frequent values
    assert codec.entropy_bits(100, np.array([1, -1] * 25, np.int16)) == pytest.approx(100 + 50)
    assert codec.entropy_bits(8, np.array([7] * 8, np.int16)) == 0
    share = 0.25
    expected = -8 * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    assert codec.entropy_bits(8, np.array([3, 3], np.int16)) == pytest.approx(expected)


def test_simulated_steps_move_little_and_in_both_directions() -> None:
    base = some()
    first, second, third = islice(simulated(base, 1e-6, seed=0), 3)
    shifts = (bits_of(first["a"]) - bits_of(base["a"])).view(np.int16)
    assert not shifts.any()  # masters round to what was given
    for old, new in ((first, second), (second, third)):
        moved = (bits_of(new["a"]) - bits_of(old["a"])).view(np.int16)
        share = np.count_nonzero(moved) / len(moved)
        assert 0.0005 < share < 0.1 and (moved > 0).any() and (moved < 0).any()
    assert pytest.approx(0.2294, abs=1e-4) == SPREAD
    _, farther = islice(simulated(base, 1e-6, seed=0, first=True), 2)
    assert codec.sizes(first, farther)["changed"] > 2 * codec.sizes(first, second)["changed"]
    again = next(islice(simulated(base, 1e-6, seed=0), 1, 2))
    assert np.array_equal(bits_of(again["b"]), bits_of(second["b"]))


def test_sizes_are_near_the_entropy_and_far_below_plain() -> None:
    base, new = codec.changed(some(2_000_000), 0.01, seed=1)
    found = codec.sizes(base, new)
    assert found.keys() >= KEYS and found["changed"] == pytest.approx(40_000, rel=0.05)
    assert 1 < found["ratio"] < 1.05 and found["plain_ratio"] > 5 and found["whole_share"] == 0
    assert found["entropy_bytes_per_changed"] == pytest.approx((8.08 + 1) / 8, rel=0.01)


def test_tensors_that_travel_whole_are_left_out() -> None:
    base, new = codec.changed(some(), 0.01, seed=1)
    new["b"] = codec.changed(base, 0.9, seed=2)[1]["b"]
    found = codec.sizes(base, new)
    assert found["whole_share"] == 0.5 and found["changed"] < 1000


def test_speed_is_measured_on_what_is_right() -> None:
    found = codec.speed(*codec.changed(some(), 0.01, seed=1), 1)
    assert all(value > 0 for value in found.values())


def test_masters_begin_anywhere_in_the_interval_that_rounds_to_a_weight() -> None:
    """Else weights near a power of two hardly ever change: the share must halve with each exponent and no faster."""
    size = 400_000
    octaves = np.repeat(np.float32(2.0) ** -np.arange(5, 9, dtype=np.float32), size)
    mantissa = np.random.default_rng(0).uniform(1, 2, len(octaves)).astype(np.float32)
    base, new = islice(simulated({"w": of_array("w", bf16(octaves * mantissa), dtype="BF16")}, 5e-6, seed=0), 2)
    changed = (bits_of(base["w"]) != bits_of(new["w"])).reshape(4, size).sum(axis=1)
    assert changed.min() > 200 and all(1.7 < b / a < 2.3 for a, b in pairwise(changed.tolist()))


def test_steps_of_adam_travel_in_less_than_their_order_0_entropy() -> None:
    found = codec.sizes(*islice(simulated(some(2_000_000), 1e-6, seed=0), 2))
    assert found["ratio"] < 0.85 and found["plain_ratio"] > 5
    assert found["bytes_per_changed"] < 0.8 * found["mergeable_bytes_per_changed"]


def test_the_last_two_versions_of_a_run(tmp_path: Path) -> None:
    async def main(versions: list[Weights]) -> None:
        chain = Chain(tmp_path / "chain", WeightSettings())
        publisher = Publisher(DirStore(tmp_path / "weights"), "p", chain=chain)
        with sqlite3.connect(tmp_path / "run.db") as database:
            database.execute("CREATE TABLE events (id)")
            database.execute("CREATE TABLE publications (policy, version, serial, manifest)")
            for version, weights in enumerate(versions):
                path = tmp_path / "model.safetensors"
                bits = {name: torch.from_numpy(bits_of(each).view(np.int16)) for name, each in weights.items()}
                save_file({name: each.view(torch.bfloat16) for name, each in bits.items()}, path)
                made = await publisher.publish(version, [path], digest_files([path]), may_link=False)
                database.execute("INSERT INTO publications VALUES ('p', ?, ?, ?)", (version, version, encode(made)))

    versions = list(islice(simulated(some(), 1e-6, seed=0), 4))
    with pytest.raises(ConfigError, match="is missing"):
        published(tmp_path)
    asyncio.run(main(versions))
    for found, weights in zip(published(tmp_path), versions[-2:], strict=True):
        assert {name: bits_of(each).tobytes() for name, each in found.items()} == {
            name: bits_of(each).tobytes() for name, each in weights.items()
        }
    with sqlite3.connect(tmp_path / "run.db") as database:
        database.execute("DELETE FROM publications WHERE version > 1")
    with pytest.raises(ConfigError, match="no policy of this run has two trained versions"):
        published(tmp_path)


def test_catching_up() -> None:
    found = catch_up(simulated(some(8000), 1e-6, seed=0))
    assert 0 < found["catch_up_bytes"] <= min(found["catch_up_sum_bytes"], found["catch_up_full_bytes"])


def test_the_whole_bench_on_a_tiny_model(tmp_path: Path) -> None:
    folder = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, dtype="bfloat16").build(
        tmp_path / "m"
    )
    assert bf16_weights(weight_files_in(folder))
    setup = bench.Setup(model_dir=folder, repeats=1, steps=2, few=3)
    found = bench.run(setup, ["codec", "catch_up"])
    for name in ("adam_1e-06", "adam_5e-06", "adam_first_1e-06", "adam_first_5e-06", "trained_1e-06", "trained_5e-06"):
        assert found[name].keys() >= KEYS
    assert found["worst_ratio"] >= found["trained_5e-06"]["ratio"] and found["memory_ratio"] > 1
    assert set(found["density"]) == {"0.001", "0.01", "0.05", "0.2"}
    assert found["left"] == ""
    assert bench.run(setup, ["catch_up"]).keys() == {"model", "left"} | {k for k in found if k.startswith("catch_up")}
    with pytest.raises(ConfigError, match="known: codec, catch_up"):
        bench.run(setup, ["codecs"])


def test_what_is_simulated_is_the_first_layers_and_all_that_is_in_none() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.a",
        "model.layers.1.a",
        "model.layers.10.a",
        "model.norm.weight",
    ]
    weights = {name: of_array(name, np.zeros(1, np.uint16)) for name in names}
    assert list(bench.first_layers(weights, 2)) == [*names[:3], names[4]]
    assert list(bench.first_layers(weights, 11)) == names


def test_pools_are_left_out_of_all_and_refused_by_name_where_there_can_be_no_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (bench, _pools):
        monkeypatch.setattr(module, "missing", lambda: "needs hardware: root")
    monkeypatch.setattr(bench, "PARTS", {"pools": bench.far_pools})
    setup = bench.Setup(model_dir=tmp_path)
    assert bench.run(setup)["left"] == "pools: needs hardware: root"
    with pytest.raises(ConfigError, match="needs hardware: root"):
        bench.run(setup, ["pools"])
