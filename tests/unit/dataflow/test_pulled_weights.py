"""Weights that a living worker is fetching are kept, and serials of a new run go on where an old one's ended."""

from __future__ import annotations

from typing import Any

import msgspec

from astraflow.types import Manifest, WeightDelta, WeightFile
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec, manifest


def publish(rig: Rig, version: int, **more: Any) -> Manifest:
    return rig.service.ledger.policies.publish(0.0, msgspec.structs.replace(manifest("p", version), **more))


def live(rig: Rig) -> set[int]:
    return {each.version for each in rig.go(rig.service.live_manifests())}


def pulls(rig: Rig, **serials: int) -> None:
    report = m.ComponentReport(pulling=serials)
    rig.go(rig.service.renew(m.RenewRequest(worker="w", incarnation="w#1", report=report)))


def test_f76_what_a_living_worker_fetches_is_kept_and_no_longer() -> None:
    with Rig(make_spec()) as rig:
        made = [publish(rig, version) for version in range(1, 6)]
        assert live(rig) == {4, 5}
        pulls(rig, p=made[1].serial)
        assert live(rig) == {2, 4, 5}
        pulls(rig, p=made[2].serial)
        assert live(rig) == {3, 4, 5}
        pulls(rig)
        assert live(rig) == {4, 5}


def test_f76_a_worker_that_died_keeps_nothing() -> None:
    with Rig(make_spec()) as rig:
        made = [publish(rig, version) for version in range(1, 6)]
        pulls(rig, p=made[1].serial, nobody=3)
        assert live(rig) == {2, 4, 5}
        rig.advance(rig.spec.limits.dead_after_s + 1)
        rig.go(rig.service.tick())
        assert live(rig) == {4, 5}


def test_deltas_and_the_anchor_of_a_version_are_among_its_files() -> None:
    files = [WeightFile(name=name, sha256=name * 64, size_bytes=3) for name in "abc"]
    deltas = tuple(WeightDelta(base_digest="1" * 64, digest="2" * 64, file=file) for file in files[1:])
    with Rig(make_spec()) as rig:
        made = publish(rig, 1, files=(files[0],), files_digest="1" * 64, deltas=deltas)
        assert made.stored == tuple(files)
        assert files[2] in {file for each in rig.go(rig.service.live_manifests()) for file in each.stored}


def test_serials_begin_where_the_launcher_says_and_then_only_grow() -> None:
    with Rig(make_spec(), publish=False) as rig:
        rig.go(rig.service.publish_initial(msgspec.structs.replace(manifest("p"), serial=1_700_000_000)))
        assert rig.service.ledger.policies.newest["p"].serial == 1_700_000_001
        rig.go(rig.service.publish_initial(msgspec.structs.replace(manifest("p"), serial=1_800_000_000)))  # again
        assert publish(rig, 1).serial == 1_700_000_002
        assert publish(rig, 2, serial=5).serial == 1_700_000_003
