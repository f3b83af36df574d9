"""What a trainer does with new weights: write the files to the store and describe them. Never waits for a worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from astraflow.errors import BadRequest
from astraflow.types import Manifest
from astraflow.weights.store import WeightStore
from astraflow.wire.names import require_name


class Publisher:
    """Publishes one policy. Publishing is a write to the store; only ``commit`` makes it the current version."""

    def __init__(self, store: WeightStore, policy: str) -> None:
        self._store = store
        self.policy = require_name(policy, "policy")

    async def publish(
        self,
        version: int,
        files: Sequence[Path],
        digest: str,
        trainer_epoch: int = 0,
        *,
        base_digest: str | None = None,
        may_link: bool = True,
    ) -> Manifest:
        """Store the files and return the manifest for ``commit``. Doing it again after a crash changes nothing.

        ``digest``: of the tensors, as ``weights.digest`` defines it. ``may_link``: nobody writes to the files again.
        Raises StorageFull, Unavailable.
        """
        if not files:
            raise BadRequest(f"version {version} of {self.policy} has no files to publish")
        stored = tuple([await self._store.put(path, may_link=may_link) for path in files])
        return Manifest(
            policy=self.policy,
            version=version,
            digest=digest,
            files=stored,
            base_digest=base_digest,
            trainer_epoch=trainer_epoch,
        )
