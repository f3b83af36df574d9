"""What this machine's processor multiplies in hardware: other half precision is up to ten times slower than float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FLAGS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""As Linux names them in /proc/cpuinfo, on x86 and on Arm."""


def multiplies(dtype: str, flags: frozenset[str] | None = None) -> bool:
    """Whether the CPU multiplies ``dtype`` in hardware; where Linux does not say, only float32 is sure.

    ``flags``: of another machine; None: of this one.
    """
    wanted = _FLAGS.get(dtype)
    return wanted is None or bool(wanted & (flags if flags is not None else _own_flags()))


@cache
def _own_flags() -> frozenset[str]:
    try:
        return flags_of(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        return frozenset()


def flags_of(cpuinfo: str) -> frozenset[str]:
    """Of the first processor of the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
