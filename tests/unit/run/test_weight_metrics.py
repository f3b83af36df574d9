"""What /metrics says of weights: lag in versions, bytes, seconds, and relays that failed or lied."""

from __future__ import annotations

import msgspec

from astraflow.observe.metrics import Registry
from astraflow.run.registry import SUMMED, fill_registry
from astraflow.wire.messages import ComponentReport, ComponentStatus, PolicyStatus, StatusReply

STATUS = StatusReply(
    run="r",
    state="running",
    error=None,
    now_s=1.0,
    policies=(PolicyStatus(policy="p", trainable=True, version=7, steps=9),),
    components=(),
    episodes={},
)


def worker(name: str, version: int | None, *, state: str = "alive", **metrics: float) -> ComponentStatus:
    report = ComponentReport(
        versions={} if version is None else {"p": version},
        metrics={key.replace("__", "/"): value for key, value in metrics.items()},
    )
    return ComponentStatus(component="rollout", name=name, state=state, heard_s=0.0, report=report)


def shown(*workers: ComponentStatus) -> dict[str, float]:
    registry = Registry()
    fill_registry(registry, msgspec.structs.replace(STATUS, components=workers))
    return registry.snapshot()


def test_they_exist_at_zero() -> None:
    names = ("weights/lag", "weights/longest_pause_s", *SUMMED)
    assert {"weights/decode_s", "weights/pause_s", "weights/refused", "relay/dropped"} < set(names)
    assert {name: shown()[name] for name in names} == dict.fromkeys(names, 0.0)


def test_the_furthest_behind_and_sums_over_who_is_alive() -> None:
    found = shown(
        worker("a", 7, weights__bytes=100.0, weights__load_s=1.5, weights__longest_pause_s=0.004, relay__failed=1.0),
        worker("d", 7, weights__longest_pause_s=0.002, weights__pause_s=0.5, weights__refused=1.0),
        worker("e", 7, weights__pause_s=0.25, weights__decode_s=2.0, weights__attest_s=1.0),
        worker(
            "b", 4, weights__bytes=70.0, weights__bytes__origin=30.0, weights__bytes__relay=40.0, relay__dropped=1.0
        ),
        worker("c", None, weights__download_s__origin=0.5, weights__download_s__relay=0.25),
        worker("gone", 1, state="dead", weights__bytes=1e9),
    )
    assert found["weights/lag"] == 3
    assert found["weights/bytes"] == 170.0
    assert found["weights/download_s"] == 0.75
    assert (found["weights/longest_pause_s"], found["weights/pause_s"]) == (0.004, 0.75)
    assert [found[f"weights/{name}"] for name in ("decode_s", "attest_s", "refused")] == [2.0, 1.0, 1.0]
    assert (found["weights/load_s"], found["relay/failed"], found["relay/dropped"]) == (1.5, 1.0, 1.0)
