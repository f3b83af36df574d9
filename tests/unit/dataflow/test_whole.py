"""From the first lease to the last commit, through the service."""

from __future__ import annotations

from tests.unit.dataflow.rig import Rig, make_spec


def test_a_run_from_first_lease_to_last_commit() -> None:
    with Rig(make_spec(steps=3)) as rig:
        epoch = rig.resume()
        for step in range(3):
            batch = rig.step(epoch)
            assert batch.version == step
            assert len(batch.rows) == 4
            rig.balanced()
        assert rig.service.ledger.state == "finished"
        assert rig.lease().finished
        assert rig.batch(epoch).finished
        status = rig.go(rig.flow.status())
        assert status.state == "finished"
        assert status.policies[0].version == 3
        assert status.policies[0].groups["trained"] == 6
        assert rig.states("samples") == {"trained": 12}
