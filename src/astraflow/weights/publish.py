"""What a trainer does with new weights: write the files to the store and describe them. Never waits for a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from astraflow.errors import BadRequest
from astraflow.observe.points import reach
from astraflow.types import Canary, Manifest, WeightFile
from astraflow.weights.chain import Anchor, Chain
from astraflow.weights.digest import digest_files, form_of_files
from astraflow.weights.store import WeightStore, weight_file_of
from astraflow.wire.names import require_name


class Publisher:
    """Publishes one policy. Publishing is a write to the store; only ``commit`` makes it the current version."""

    def __init__(
        self,
        store: WeightStore,
        policy: str,
        *,
        chain: Chain | None = None,
        initial: Sequence[Path] = (),
        canary: Callable[[Sequence[Path], str], Canary] | None = None,
    ) -> None:
        """``chain``: publish deltas where they are smaller; None: always everything. ``initial``: files of version 0,
        which the launcher has published. ``canary``: makes that of files with a digest; None: versions have none."""
        self._store = store
        self.policy = require_name(policy, "policy")
        self._chain = chain
        self._initial = tuple(initial)
        self._canary = canary
        self._newest: Manifest | None = None

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
        canary = None
        if self._canary is not None and base_digest is None:
            canary = await asyncio.to_thread(self._canary, files, digest)
        if self._chain is not None and base_digest is None:
            found = await self._publish(self._chain, version, files, digest, trainer_epoch, may_link=may_link)
            return msgspec.structs.replace(found, canary=canary, form=await asyncio.to_thread(form_of_files, files))
        stored = tuple([await self._store.put(path, may_link=may_link) for path in files])
        reach("trainer.in_publish")
        return Manifest(
            policy=self.policy,
            version=version,
            digest=digest,
            files=stored,
            base_digest=base_digest,
            trainer_epoch=trainer_epoch,
            canary=canary,
            form="" if base_digest is not None else await asyncio.to_thread(form_of_files, files),
        )

    async def _publish(
        self, chain: Chain, version: int, files: Sequence[Path], digest: str, trainer_epoch: int, *, may_link: bool
    ) -> Manifest:
        newest = self._newest
        if newest is not None and (newest.version, newest.digest) == (version, digest):
            return msgspec.structs.replace(newest, trainer_epoch=trainer_epoch)
        if version == 1 and chain.digest is None and self._initial:
            await self._begin(chain)
        step = await asyncio.to_thread(chain.prepare, files, digest)
        if not step.full and not await self._is_there(chain.anchor):
            step = replace(step, full=True)  # lost from the store: newcomers would have nowhere to begin
        full: tuple[WeightFile, ...] = ()
        if step.full:
            full = tuple([await self._store.put(path, may_link=may_link) for path in files])
        reach("trainer.in_publish")
        stored = [await self._store.put(link.path, may_link=True) for link in step.links]
        await asyncio.to_thread(chain.accept, step, stored, full)
        anchor = chain.anchor
        assert anchor is not None, "what was published last is an anchor or leads back to one"
        self._newest = Manifest(
            policy=self.policy,
            version=version,
            digest=digest,
            files=anchor.files,
            files_digest="" if anchor.digest == digest else anchor.digest,
            deltas=chain.deltas,
            trainer_epoch=trainer_epoch,
        )
        return self._newest

    async def _is_there(self, anchor: Anchor | None) -> bool:
        return anchor is not None and all([await self._store.has(file.sha256) for file in anchor.files])

    async def _begin(self, chain: Chain) -> None:
        """Version 0 is where the first delta starts."""
        stored = tuple([await asyncio.to_thread(weight_file_of, path) for path in self._initial])
        chain.begin(self._initial, await asyncio.to_thread(digest_files, self._initial), stored)
