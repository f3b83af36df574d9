"""What a publisher remembers so that its next version can travel as a delta: the last one's files and recent deltas.

    version   n-4 ─► n-3 ─► n-2 ─► n-1 ─► n        every step, the last ``keep`` of them
               └──────────────┴────────────┘       merged by two, aligned
               └───────────────────────────┘       merged by four, and so on: one merge per version on average

Everything is compared with what was published last (F79). A new process begins anew, with full weights.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import WeightsRefused
from astraflow.types import WeightDelta, WeightFile
from astraflow.weights.delta import compact_delta, encode_delta, merge_deltas
from astraflow.weights.rebuild import read_weights
from astraflow.weights.settings import WeightSettings

WORTH = 0.75
"""A delta larger than so much of the full weights is not published: everything is, and the chain begins anew."""


@dataclass(frozen=True, slots=True)
class Link:
    """One delta between two places of the chain."""

    begin: int
    end: int
    path: Path
    """What travels: the changes in as few bytes as they take."""
    plain: Path
    """The same changes for merging: with positions that stand alone. ``path`` where those travel."""
    base_digest: str
    digest: str


@dataclass(frozen=True, slots=True)
class Anchor:
    """The last version in full."""

    at: int
    digest: str
    files: tuple[WeightFile, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What the next version adds; nothing is remembered of it before ``accept``."""

    at: int
    digest: str
    files: tuple[Path, ...]
    links: tuple[Link, ...]
    """Empty: it must be published in full, and nothing leads to it."""
    full: bool


class Chain:
    """Of one policy, in a folder of its own that lives as long as this object. ``prepare`` blocks; ``accept`` follows
    when everything is stored."""

    def __init__(self, folder: Path, settings: WeightSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._links: list[tuple[Link, WeightDelta]] = []
        self._last: Step | None = None
        self._skip = 0
        """So many versions are not even tried: one before them was not worth a delta."""
        self.anchor: Anchor | None = None
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    @property
    def digest(self) -> str | None:
        """Of what was published last."""
        return self._last.digest if self._last is not None else None

    @property
    def deltas(self) -> tuple[WeightDelta, ...]:
        """What leads to the last version, oldest first."""
        return tuple(delta for _, delta in self._links)

    def begin(self, files: Sequence[Path], digest: str, stored: tuple[WeightFile, ...]) -> None:
        """From weights that were published by somebody else, and whose files nobody changes."""
        self._last = Step(0, digest, tuple(files), (), True)
        self.anchor = Anchor(0, digest, stored)

    def prepare(self, files: Sequence[Path], digest: str) -> Step:
        """The deltas to the weights in ``files``. Again, after a failure, gives the same."""
        last = self._last
        if last is None or self.anchor is None:
            return Step(0, digest, self._keep(files, 0), (), True)
        at = last.at + 1
        kept = self._keep(files, at)
        link = self._encode(last, at, kept, digest) if not self._skip else None
        if link is None:
            return Step(at, digest, kept, (), True)
        links = [link]
        span = 1
        while at % (2 * span) == 0 and 2 * span <= self._settings.keep:
            before = self._find(at - 2 * span, at - span)
            if before is None:
                break
            try:
                links.append(self._merge(before, links[-1], kept))
            except (FileNotFoundError, WeightsRefused):
                break  # another trainer has swept this folder, or both together are more than one delta may be
            span *= 2
        return Step(at, digest, kept, tuple(links), at - self.anchor.at >= self._settings.anchor_every)

    def accept(self, step: Step, stored: Sequence[WeightFile], full: tuple[WeightFile, ...]) -> None:
        """Everything of ``step`` is in the store: its links as ``stored``, its weights, if they had to, as ``full``."""
        if not step.links:
            self._drop(self._links)
            self._links = []
        for link, file in zip(step.links, stored, strict=True):
            self._links.append((link, WeightDelta(base_digest=link.base_digest, digest=link.digest, file=file)))
        old = [each for each in self._links if each[0].begin < step.at - self._settings.keep]
        self._drop(old)
        self._links = [each for each in self._links if each not in old]
        if step.links or self._last is None:
            self._skip = 0
        else:
            self._skip = self._skip - 1 if self._skip else self._settings.anchor_every - 1
        if step.full:
            self.anchor = Anchor(step.at, step.digest, full)
        before, self._last = self._last, step
        if before is not None and before.at != step.at:
            shutil.rmtree(self._place(before.at), ignore_errors=True)

    def _encode(self, last: Step, at: int, files: Sequence[Path], digest: str) -> Link | None:
        """None: not worth it, or the weights have another form now, or the last ones are gone from the disk."""
        try:
            delta = encode_delta(
                read_weights(last.files), read_weights(files), base_digest=last.digest, target_digest=digest
            )
        except WeightsRefused:
            return None
        if len(delta) > WORTH * sum(path.stat().st_size for path in files):
            return None
        return self._write(last.at, at, last.digest, digest, delta, files)

    def _merge(self, first: Link, second: Link, files: Sequence[Path]) -> Link:
        merged = merge_deltas(first.plain.read_bytes(), second.plain.read_bytes())
        return self._write(first.begin, second.end, first.base_digest, second.digest, merged, files)

    def _write(self, begin: int, end: int, base: str, digest: str, delta: bytes, files: Sequence[Path]) -> Link:
        """``files``: the weights that it leads to."""
        small = self._compact(delta, files)
        path = self._folder / f"delta-{begin}-{end}.safetensors"
        plain = path.with_name(f"plain-{begin}-{end}.safetensors")
        for place in (path, plain):
            place.unlink(missing_ok=True)  # of an attempt before, perhaps linked into a store: never written into
        path.write_bytes(small)
        if small is delta:
            return Link(begin, end, path, path, base, digest)
        plain.write_bytes(delta)
        return Link(begin, end, path, plain, base, digest)

    def _compact(self, delta: bytes, files: Sequence[Path]) -> bytes:
        """The delta itself, where it is not asked for, does not pay, or would be more than one delta may be."""
        try:
            return compact_delta(delta, read_weights(files)) if self._settings.compact else delta
        except WeightsRefused:
            return delta

    def _find(self, begin: int, end: int) -> Link | None:
        return next((link for link, _ in self._links if (link.begin, link.end) == (begin, end)), None)

    def _keep(self, files: Sequence[Path], at: int) -> tuple[Path, ...]:
        """Links to files that their maker will remove, or copies where the disk has no links."""
        place = self._place(at)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for path in files:
            try:
                os.link(path, place / path.name)
            except OSError:
                shutil.copyfile(path, place / path.name)
        return tuple(place / path.name for path in files)

    def _place(self, at: int) -> Path:
        return self._folder / f"weights-{at}"

    def _drop(self, links: Sequence[tuple[Link, WeightDelta]]) -> None:
        for link, _ in links:
            link.path.unlink(missing_ok=True)
            link.plain.unlink(missing_ok=True)
