"""One delta against the entropy of what changed, against the usual formats, and against plain numpy on the same arrays.

The rivals: the usual format (uint32 position and 2-byte value), the same through zstd, the XOR of everything through
zstd; ``flatnonzero`` and gather to make, a scatter to apply. All in this process.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from astraflow.run.bench._adam import Weights
from astraflow.types import Array
from astraflow.weights.delta import apply_delta, bits_of, compact_delta, encode_delta
from astraflow.weights.delta_file import parse


def sizes(base: Weights, new: Weights) -> dict[str, Any]:
    """A delta's bytes as it is published, beside its entropy and its rivals. Tensors that travel whole are in none."""
    plain_delta = encode_delta(base, new, base_digest="0" * 64, target_digest="0" * 64)
    delta = compact_delta(plain_delta, new)
    entries = parse(delta).entries
    whole = {entry.name for entry in entries if entry.whole}
    whole_bytes = sum(entry.stream_bytes for entry in entries if entry.whole)
    ours = len(delta) - whole_bytes
    count, bits = 0, 0.0
    positions, values, xor = [], [], []
    for name, tensor in base.items():
        if name in whole:
            continue
        old, now = bits_of(tensor), bits_of(new[name])
        where = np.flatnonzero(old != now)
        count += len(where)
        bits += entropy_bits(len(old), (now[where] - old[where]).view(np.int16))
        positions.append(where.astype(np.uint32))
        values.append(now[where])
        xor.append(old ^ now)
    plain = [each.tobytes() for pair in zip(positions, values, strict=True) for each in pair]
    elements = sum(len(bits_of(tensor)) for tensor in base.values())
    left_out = sum(len(bits_of(base[name])) for name in whole)
    return {
        "changed": count,
        "changed_share": count / max(1, elements - left_out),
        "whole_share": left_out / elements,
        "bytes_per_changed": ours / count,
        "mergeable_bytes_per_changed": (len(plain_delta) - whole_bytes) / count,
        "entropy_bytes_per_changed": bits / 8 / count,
        "ratio": ours / (bits / 8),
        "plain_ratio": 6 * count / ours,
        "plain_zstd_ratio": _zstd(plain, ours),
        "xor_zstd_ratio": _zstd([each.tobytes() for each in xor], ours),
        "share_of_full": len(delta) / (2 * elements),
    }


def entropy_bits(size: int, differences: Array) -> float:
    """N·H₂(k/N) for where, k·H(empirical) for what: order-0 entropy (Shannon, 1948)."""
    changed = len(differences)
    if not changed:
        return 0.0
    share = changed / size
    where = 0.0 if changed == size else -size * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    counts = np.unique(differences, return_counts=True)[1] / changed
    return float(where - changed * (counts * np.log2(counts)).sum())


def changed(weights: Weights, share: float, *, seed: int) -> tuple[Weights, Weights]:
    """The weights, and a copy in which this share of each tensor moved by one unit of the last bit."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in weights.items():
        bits = bits_of(tensor).copy()
        where = np.flatnonzero(rng.random(len(bits), np.float32) < share)
        bits[where] += rng.choice(np.array([1, 65535], np.uint16), len(where))
        new[name] = tensor._replace(data=bits.view(np.uint8))
    return weights, new


def speed(base: Weights, new: Weights, repeats: int) -> dict[str, float]:
    """Best of ``repeats`` each. The digests of manifests are known to a publisher and are not made here."""
    pairs = {name: (bits_of(base[name]), bits_of(new[name])) for name in base}
    gathered: dict[str, tuple[Array, Array]] = {}

    def gather() -> None:
        for name, (old, now) in pairs.items():
            where = np.flatnonzero(old != now)
            gathered[name] = (where, now[where])

    numpy_encode_s = _best(gather, repeats)
    encode_s = _best(lambda: encode_delta(base, new), repeats)
    mergeable = encode_delta(base, new)
    compact_s = _best(lambda: compact_delta(mergeable, new), repeats)
    delta = compact_delta(mergeable, new)
    held = {name: tensor._replace(data=tensor.data.copy()) for name, tensor in base.items()}

    def reset() -> None:
        for name, tensor in held.items():
            np.copyto(tensor.data, base[name].data)

    def scatter() -> None:
        for name, tensor in held.items():
            where, what = gathered[name]
            tensor.data.view(np.uint16)[where] = what

    numpy_apply_s = _best(scatter, repeats, reset)
    apply_s = _best(lambda: apply_delta(held, delta), repeats, reset)
    assert all(np.array_equal(held[name].data, new[name].data) for name in held), "applied is what was encoded"
    mergeable_s = _best(lambda: apply_delta(held, mergeable), repeats, reset) if delta is not mergeable else apply_s
    reset()
    return {
        "encode_ms": encode_s * 1e3,
        "encode_vs_numpy": numpy_encode_s / encode_s,
        "compact_ms": compact_s * 1e3,
        "publish_vs_numpy": numpy_encode_s / (encode_s + compact_s),
        "apply_ms": apply_s * 1e3,
        "apply_vs_numpy": numpy_apply_s / apply_s,
        "mergeable_apply_vs_numpy": numpy_apply_s / mergeable_s,
        "delta_bytes": len(delta),
        "memory_ratio": 1 + _beyond(lambda: apply_delta(held, delta)) / len(delta),
    }


def _best(call: Callable[[], object], repeats: int, before: Callable[[], None] = lambda: None) -> float:
    times = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def _beyond(call: Callable[[], None]) -> int:
    """Bytes that Python and numpy hold at most, beyond what they held before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _zstd(parts: list[bytes], ours: int) -> float | None:
    """Bytes by zstd, level 3, over ours; None where the package is not installed (extra ``bench``)."""
    try:
        import zstandard
    except ImportError:
        return None
    compressor = zstandard.ZstdCompressor(level=3)
    return sum(len(compressor.compress(part)) for part in parts) / ours
