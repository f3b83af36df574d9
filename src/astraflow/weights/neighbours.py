"""The data ports of other workers: which of them has a file, which is nearest, which has lied.

Nearest is who answers first in the own region; other regions are asked only where the origin cannot be reached. What
comes is checked by SHA-256. A relay that serves anything else is dropped for good (until it is another process), one
that is silent, slow or cut off rests for a while. Nothing here is needed: whoever asks goes to the origin next.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from astraflow.clock import Clock, SystemClock
from astraflow.disk import is_full
from astraflow.errors import AstraFlowError, ConfigError, DigestMismatch, ProtocolError
from astraflow.types import WeightFile
from astraflow.weights.store import PART
from astraflow.wire.messages import RelayPlace

log = logging.getLogger("astraflow.weights")

MOST_ASKED = 8
"""Relays asked for one file."""
MOST_PULLS = 2
"""Relays that are asked, one after the other, to get a file that none of them has."""
POLL_S = (0.1, 1.0)


class Link(Protocol):
    """A connection to one data port; ``wire.client.RelayLink`` is one."""

    async def held(self, file: WeightFile, *, pull: bool = False) -> int | None:
        """Bytes that it has of the file; None: it cannot be had there."""

    async def download(self, file: WeightFile, into: Path) -> None:
        """Verified, or DigestMismatch and nothing there."""

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """With a relay, in seconds and bytes/s; the origin is asked once it is over."""

    silence_s: float = 10.0
    """Without a further byte while it gets a file for us."""
    slowest_bytes_per_s: float = 256 << 10
    """A download that is slower on the whole is broken off, and so is waiting for one that a relay makes for us."""
    rest_s: float = 30.0
    """How long a relay that failed is not asked again."""

    def __post_init__(self) -> None:
        for name in ("silence_s", "slowest_bytes_per_s", "rest_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"Patience.{name} must be in (0, inf), found {value}")

    def limit_s(self, size_bytes: int) -> float:
        """Of one download."""
        return self.silence_s + size_bytes / self.slowest_bytes_per_s


class Neighbours:
    """All that one worker knows of other workers' relays. Used from one event loop."""

    def __init__(
        self,
        connect: Callable[[str], Link],
        *,
        region: str = "",
        patience: Patience | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.region = region
        self.counts: Counter[str] = Counter()
        self._connect = connect
        self._patience = patience or Patience()
        self._clock = clock or SystemClock()
        self._places: dict[str, RelayPlace] = {}
        self._links: dict[str, Link] = {}
        self._rests: dict[str, float] = {}
        self.dropped: dict[tuple[str, str], str] = {}
        """(URL, incarnation) of relays that lied → what they did."""

    def know(self, places: Sequence[RelayPlace]) -> None:
        """Who is there now, as dataflow says; replaces what was known before."""
        self._places = {place.url: place for place in places}

    async def fetch(self, file: WeightFile, into: Path, *, near: bool, pull: bool) -> bool:
        """Whether ``into`` is now the file, from a relay of the own region (``near``) or of another one.

        ``pull``: if none has it, ask one to get it and wait while bytes arrive there. Raises only for our own disk.
        """
        places = sorted((p for p in self._places.values() if self._may_ask(p, near=near)), key=_order_for(file))
        places = places[:MOST_ASKED]
        for place in await self._holders(places, file):
            if await self._download(place, file, into):
                return True
        for place in places[:MOST_PULLS] if pull else ():
            held = self._may_ask(place, near=near) and await self._until_held(place, file)
            if held and await self._download(place, file, into):
                return True
        return False

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()

    # ── asking ──

    def _may_ask(self, place: RelayPlace, *, near: bool) -> bool:
        if (place.region == self.region) is not near or (place.url, place.incarnation) in self.dropped:
            return False
        return self._rests.get(place.url, float("-inf")) <= self._clock.monotonic()

    async def _holders(self, places: Sequence[RelayPlace], file: WeightFile) -> list[RelayPlace]:
        """Who has all of it; who answered first, first."""
        found: list[RelayPlace] = []

        async def ask(place: RelayPlace) -> None:
            if await self._asked(place, self._link(place).held(file)) == file.size_bytes:
                found.append(place)

        await asyncio.gather(*(ask(place) for place in places))
        return found

    async def _until_held(self, place: RelayPlace, file: WeightFile) -> bool:
        most, since, pause = -1, self._clock.monotonic(), POLL_S[0]
        limit = since + self._patience.limit_s(file.size_bytes)
        while True:
            have = await self._asked(place, self._link(place).held(file, pull=True))
            now = self._clock.monotonic()
            if have is None:
                return False
            if have == file.size_bytes:
                return True
            if now >= limit:  # one that tells a byte more each time would hold us for good
                self._rest(place, f"it gets {file.name} slower than {self._patience.slowest_bytes_per_s:g} bytes/s")
                return False
            if have > most:
                most, since = have, now
            elif now - since >= self._patience.silence_s:
                self._rest(place, f"it stands at byte {have} of {file.name}")
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_S[1])

    async def _asked(self, place: RelayPlace, answer: Awaitable[int | None]) -> int | None:
        try:
            return await answer
        except ProtocolError as error:
            self._drop(place, str(error))
        except AstraFlowError as error:
            self._rest(place, str(error))
        return None

    async def _download(self, place: RelayPlace, file: WeightFile, into: Path) -> bool:
        # A part of its own: bytes of a relay are never mixed with others', so that it is known who lied.
        part = into.with_name(f"{PART}{secrets.token_hex(8)}")
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._patience.limit_s(file.size_bytes)):
                await self._link(place).download(file, part)
            await asyncio.to_thread(part.replace, into)
        except (DigestMismatch, ProtocolError) as error:
            self._drop(place, str(error))
        except TimeoutError:
            self._rest(place, f"{file.name} came slower than {self._patience.slowest_bytes_per_s:g} bytes/s")
        except (AstraFlowError, OSError) as error:
            if is_full(error):
                raise
            self._rest(place, str(error))
        else:
            self.counts["weights/bytes/relay"] += file.size_bytes
            self.counts["weights/download_s/relay"] += self._clock.monotonic() - began  # type: ignore[assignment]
            return True
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        return False

    # ── judging ──

    def _link(self, place: RelayPlace) -> Link:
        if place.url not in self._links:
            self._links[place.url] = self._connect(place.url)
        return self._links[place.url]

    def _drop(self, place: RelayPlace, why: str) -> None:
        self.dropped[place.url, place.incarnation] = why
        self.counts["relay/dropped"] += 1
        log.error("relay_dropped worker=%s url=%s: it serves what it should not: %s", place.worker, place.url, why)

    def _rest(self, place: RelayPlace, why: str) -> None:
        self._rests[place.url] = self._clock.monotonic() + self._patience.rest_s
        self.counts["relay/failed"] += 1
        log.warning("relay_failed worker=%s url=%s rest_s=%g: %s", place.worker, place.url, self._patience.rest_s, why)


def _order_for(file: WeightFile) -> Callable[[RelayPlace], bytes]:
    """Who gets a file for its region: the same one for everybody who knows the same relays, another for each file.

    Highest random weight (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).
    """
    return lambda place: hashlib.sha256(f"{file.sha256} {place.url}".encode()).digest()
