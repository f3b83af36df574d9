"""A second trainer of a policy beside the supervised one, as an operator might start it by mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from astraflow.run.child import Child, ChildSpec, shared_cores
from astraflow.run.layout import RunFolder
from astraflow.wire.calls import Role
from astraflow.wire.tokens import ENVIRONMENT, Tokens

GRACE_S = 5.0


@asynccontextmanager
async def second_trainer(run: RunFolder, policy: str) -> AsyncIterator[Child]:
    """Ends with the block, if nobody has ended it before."""
    spec = ChildSpec(
        name=f"second-trainer-{policy}",
        arguments=("trainer", "--run-dir", str(run.path), "--dataflow", run.url(), "--policy", policy),
        environment={**shared_cores(4), ENVIRONMENT: Tokens.read(run.path).of(Role.TRAINER, policy)},
        log=run.logs / f"second-trainer-{policy}.log",
    )
    child = await Child.start(spec)
    try:
        yield child
    finally:
        if child.code is None:
            await child.end(grace_s=GRACE_S)
