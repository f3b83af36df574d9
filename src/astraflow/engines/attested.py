"""An engine that is believed only after it has been looked at: it serves a version when it holds what was published.

    load ─► the engine's own load ─► its tensors beside the files, the canary's prompts ─► attested ─► replies pass
                                                                                      └─► refused: Unattested

The engine samples by new weights from the moment that it takes them, before anybody can look: a reply with a token of a
version that is not attested yet waits for the verdict, and fails with the diagnosis where that is bad. So nothing that
wrong weights have sampled leaves this file. Without tensors to see and without a canary, the engine's word is taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from astraflow.engines.base import Engine, EngineInfo, GenerateReply, GenerateRequest, Scores, ShowsTensors
from astraflow.errors import EngineFailed, TimedOut, Unattested, WeightsRefused
from astraflow.observe.waits import Wait
from astraflow.types import Array, Canary, Manifest
from astraflow.weights.attest import Diagnosis, Finding, compare
from astraflow.weights.canary import check_canary, check_template
from astraflow.weights.rebuild import read_weights
from astraflow.weights.tensors import Tensor

log = logging.getLogger("astraflow.weights")

Render = Callable[[str], Sequence[int]]
"""What a user says to a prompt's token ids, by the template that this worker plays with."""
Key = tuple[int, str]
"""Version and digest."""
REMEMBERED = 4
"""Canaries of versions before: what an engine answers that has not moved."""


class AttestedEngine:
    """``engines.base.Engine`` around another one. What ``info`` says is held was not refused."""

    def __init__(self, engine: Engine, *, render: Render | None = None, deadline_s: float = 120.0) -> None:
        """``deadline_s``: of the verdict on one version; what takes longer is refused."""
        self.engine = engine
        self._render = render
        self._deadline_s = deadline_s
        self._loading = asyncio.Lock()
        self._moved = asyncio.Condition()
        self._attested: set[Key] = set()
        self._bad: dict[Key, str] = {}
        """Refused, and not taken anew since: why."""
        self._refusals = 0
        self._refused_at: dict[Key, int] = {}
        """Which refusal was the last one of a version."""
        self._newest = -1
        self._files: dict[str, tuple[Path, ...]] = {}
        """Of the version that was attested last, by its digest."""
        self._canaries: dict[int, Canary] = {}
        self._counts: Counter[str] = Counter()
        self._attest_s = 0.0

    def metrics(self) -> dict[str, float]:
        """Counters of the report."""
        found = {"weights/attested": 0.0, "weights/refused": 0.0, **self._counts, "weights/attest_s": self._attest_s}
        for name in ("pause_s", "longest_pause_s"):
            found[f"weights/{name}"] = float(getattr(self.engine, name, 0.0))
        return found

    # ── the engine's face ──

    def info(self) -> EngineInfo:
        found = self.engine.info()
        bad = {version for version, digest in found.digests.items() if (version, digest) in self._bad}
        if not bad:
            return found
        return msgspec.structs.replace(
            found,
            versions=tuple(version for version in found.versions if version not in bad),
            digests={version: digest for version, digest in found.digests.items() if version not in bad},
        )

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        began = self._refusals
        reply = await self.engine.generate(request)
        for span in reply.spans:
            await self._until_attested((span.version, span.digest), began)
        return reply

    async def load(self, manifest: Manifest, files: list[Path]) -> None:
        """Raises Unattested beside what the engine raises: it now holds something else than was published."""
        async with self._loading:
            if manifest.canary is not None:
                await self._plant(manifest.canary)
            await self.engine.load(manifest, files)
            if manifest.serial < self._newest and self.engine.info().digests.get(manifest.version) != manifest.digest:
                return  # older than what it holds, which it keeps (F84)
            key, began = (manifest.version, manifest.digest), time.monotonic()
            try:
                finding = await self._look(manifest, files)
                if finding is not None:
                    raise Unattested(str(finding))
            except BaseException as error:  # whatever it was, nobody knows now what the engine holds
                await self._refuse(key, str(error) or type(error).__name__)
                raise
            finally:
                self._attest_s += time.monotonic() - began
            await self._accept(key, manifest, files)

    # ── looking ──

    async def _plant(self, canary: Canary) -> None:
        """Have the old weights compute the warm prompts: a cache that outlives them then has these, whatever else was
        asked."""
        if not isinstance(self.engine, Scores) or not self.engine.info().versions:
            return
        at = self.engine.info().versions[-1]
        warm = [each for each in canary.prompts if not each.cold]
        asked = (self.engine.score(_ids(each.tokens), _ids(each.reply[:1]), at) for each in warm)
        try:
            async with asyncio.timeout(self._deadline_s):
                await asyncio.gather(*asked)
        except TimeoutError as error:
            raise TimedOut(
                f"{Wait.WEIGHTS}: v{at}, which the engine still holds, did not answer the canary within "
                f"{self._deadline_s:g} s"
            ) from error

    async def _look(self, manifest: Manifest, files: Sequence[Path]) -> Finding | None:
        held = self.engine.info().digests
        if held.get(manifest.version) != manifest.digest:
            said = ", ".join(f"v{version}" for version in held) or "nothing"
            return Finding(Diagnosis.NEVER_APPLIED, f"the engine acknowledged the version and holds {said}")
        seen, asked = False, False
        try:
            async with asyncio.timeout(self._deadline_s):
                if isinstance(self.engine, ShowsTensors) and manifest.base_digest is None:
                    shown = await asyncio.to_thread(self.engine.tensors, manifest.version)
                    seen = shown is not None
                    if shown is not None:
                        finding = await asyncio.to_thread(self._compare, shown, manifest, files)
                        if finding is not None:
                            return finding
                if manifest.canary is not None and isinstance(self.engine, Scores):
                    asked = True
                    return await self._ask(manifest.canary, manifest.version, self.engine)
        except TimeoutError as error:
            raise TimedOut(
                f"{Wait.WEIGHTS}: the engine could not be looked at within {self._deadline_s:g} s after it took "
                f"v{manifest.version} of {manifest.policy}"
            ) from error
        if not seen and not asked:
            self._counts["weights/believed"] += 1
        return None

    def _compare(self, shown: Iterable[Tensor], manifest: Manifest, files: Sequence[Path]) -> Finding | None:
        before = [paths for digest, paths in self._files.items() if digest != manifest.digest]
        old = None
        if before:
            try:
                old = read_weights(before[-1])
            except WeightsRefused:  # trimmed from the cache meanwhile: the diagnosis then knows less
                old = None
        return compare(shown, read_weights(files), old)

    async def _ask(self, canary: Canary, version: int, engine: Scores) -> Finding | None:
        rendered = [self._render(each.text) if each.text and self._render else None for each in canary.prompts]
        finding = check_template(canary, rendered)
        if finding is not None:
            return finding
        said = await asyncio.gather(
            *(engine.score(_ids(each.tokens), _ids(each.reply), version) for each in canary.prompts)
        )
        earlier = {at: each for at, each in self._canaries.items() if at < version}
        return check_canary(canary, said, dtype=self.engine.info().dtype, earlier=earlier)

    # ── the verdict ──

    async def _accept(self, key: Key, manifest: Manifest, files: Sequence[Path]) -> None:
        self._newest = max(self._newest, manifest.serial)
        self._files = {manifest.digest: tuple(files)}
        if manifest.canary is not None:
            known = {**self._canaries, manifest.version: manifest.canary}
            self._canaries = dict(list(known.items())[-REMEMBERED:])
        async with self._moved:
            self._attested.add(key)
            self._bad.pop(key, None)
            self._counts["weights/attested"] += 1
            self._moved.notify_all()

    async def _refuse(self, key: Key, why: str) -> None:
        async with self._moved:
            self._refusals += 1
            self._refused_at[key] = self._refusals
            self._bad[key] = why
            self._attested.discard(key)
            self._counts["weights/refused"] += 1
            self._moved.notify_all()

    async def _until_attested(self, key: Key, began: int) -> None:
        """``began``: the refusals when the reply was asked for; a version refused since has sampled some of it."""
        try:
            async with asyncio.timeout(self._deadline_s), self._moved:
                await self._moved.wait_for(lambda: key in self._attested or key in self._refused_at)
        except TimeoutError as error:
            raise EngineFailed(f"v{key[0]} was not attested within {self._deadline_s:g} s") from error
        if key in self._bad or self._refused_at.get(key, 0) > began:
            raise EngineFailed(f"sampled by weights that are not v{key[0]}: {self._bad.get(key, 'refused then')}")


def _ids(tokens: Sequence[int]) -> Array:
    return np.array(tokens, np.int32)
