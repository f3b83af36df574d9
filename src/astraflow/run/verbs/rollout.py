"""A rollout service alone: pulls leases from --dataflow; the token is taken from ASTRAFLOW_TOKEN, or from --run-dir."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class Args:
    dataflow: str
    """URL of the run's dataflow."""
    recipe: Positional[str | None] = None
    """File, or package.module:function; left out, --run-dir has it."""
    run_dir: Path | None = None
    """Of a run on this machine."""
    set: list[str] = field(default_factory=list)
    """path=value, any number; as the run was started."""
    seed: int | None = None
    name: str | None = None
    """Unique in the run; made up if left out."""
    ca: Path | None = None
    """Certificate to trust beside the system's."""
    policies: str = ""
    """Names, with commas: only these have an engine here, others are asked for at other workers. Empty: all."""
    policy_port: int | None = None
    """Open an endpoint at which other workers may ask for the policies. 0: any free one."""
    policy_host: str = "127.0.0.1"
    """Where it listens; other machines need another than loopback."""
    policy_address: str = ""
    """Host name under which others reach it, if that is another; the certificate must be for it."""
    region: str = ""
    """Workers of one region share weights by relays; where the recipe names regions, one of them."""
    relay_port: int | None = None
    """Open a data port for the other workers of the region: a relay of weights. 0: any free one."""
    relay_host: str = "127.0.0.1"
    """Where it listens; other machines need another than loopback."""
    relay_address: str = ""
    """Host name under which others reach it, if that is another."""
    relay_gib: float = 16.0
    """Disk for weights that only the relay still holds."""
    tls_cert: Path | None = None
    """Of the data port and of the endpoint; other workers trust it by --ca, or because the system does."""
    tls_key: Path | None = None
    weights_mbit: float | None = None
    """Limit on weights sent and received, in Mbit/s."""


def main(args: Args) -> int:
    from astraflow.run.child import hold_lifeline
    from astraflow.run.prepare import recipe_of
    from astraflow.run.serve_rollout import Serves, serve_rollout
    from astraflow.run.stores import Sharing
    from astraflow.wire.calls import Role
    from astraflow.wire.tokens import lend

    hold_lifeline()
    lend(args.run_dir, Role.WORKER)
    sharing = Sharing(
        region=args.region,
        relay_port=args.relay_port,
        relay_host=args.relay_host,
        relay_address=args.relay_address,
        relay_gib=args.relay_gib,
        weights_mbit=args.weights_mbit,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
    )
    serves = Serves(
        policies=tuple(filter(None, args.policies.split(","))),
        host=args.policy_host,
        port=args.policy_port,
        address=args.policy_address,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        ca=args.ca,
    )
    resolved = recipe_of(args.recipe, args.run_dir, args.set, args.seed)
    return asyncio.run(
        serve_rollout(
            resolved,
            url=args.dataflow,
            name=args.name,
            run_dir=args.run_dir,
            ca=args.ca,
            sharing=sharing,
            serves=serves,
        )
    )
