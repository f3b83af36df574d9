"""Names and numbers that strangers choose and that become keys, file names and log words (F94)."""

from __future__ import annotations

import re
from typing import Any

from astraflow.errors import BadRequest
from astraflow.types import Manifest

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_RELAY = re.compile(r"https?://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}
MAX_CANARY_PROMPTS, MAX_CANARY_TOKENS = 32, 8192
"""They travel with every manifest, and an engine computes them all before it serves."""
NAME_FIELDS = ("policy", "worker", "name", "component", "incarnation", "trainer")
"""Fields of requests that hold a name, wherever they occur."""


def require_name(value: str, what: str) -> str:
    """``value`` if it is a safe name: [A-Za-z0-9._-]{1,128}, not ``.`` or ``..``, not a device of some system."""
    if not _NAME.fullmatch(value) or value in (".", "..") or value.split(".")[0].lower() in _DEVICES:
        raise BadRequest(f"{what} must match [A-Za-z0-9._-]{{1,128}} and be no reserved name, found {value[:40]!r}")
    return value


def require_sha256(value: str, what: str) -> str:
    """``value`` if it is a SHA-256 in lower-case hexadecimal."""
    if not _SHA256.fullmatch(value):
        raise BadRequest(f"{what} must be 64 lower-case hexadecimal digits, found {value[:40]!r}")
    return value


def require_manifest(manifest: Manifest) -> Manifest:
    """``manifest`` if its names may become file names and its files can be addressed."""
    require_name(manifest.policy, "Manifest.policy")
    seen = set()
    for file in manifest.files:
        require_name(file.name, "WeightFile.name")
        require_sha256(file.sha256, "WeightFile.sha256")
        if file.size_bytes < 0 or file.name in seen:
            raise BadRequest(f"Manifest of {manifest.policy} names {file.name} twice or with a negative size")
        seen.add(file.name)
    for what, value in (("files_digest", manifest.files_digest), ("form", manifest.form)):
        if value:
            require_sha256(value, f"Manifest.{what}")
    for delta in manifest.deltas:
        require_name(delta.file.name, "WeightDelta.file.name")
        for what in (delta.file.sha256, delta.base_digest, delta.digest):
            require_sha256(what, "WeightDelta")
        if delta.file.size_bytes < 0:
            raise BadRequest(f"Manifest of {manifest.policy} names {delta.file.name} with a negative size")
    canary = manifest.canary
    if canary is not None:
        size = sum(len(prompt.tokens) + len(prompt.reply) for prompt in canary.prompts)
        if not 1 <= len(canary.prompts) <= MAX_CANARY_PROMPTS or size > MAX_CANARY_TOKENS:
            raise BadRequest(
                f"Manifest.canary has 1 to {MAX_CANARY_PROMPTS} prompts and at most {MAX_CANARY_TOKENS} tokens, "
                f"found {len(canary.prompts)} with {size}"
            )
    return manifest


def require_place(report: Any) -> None:
    """Check where a component says that it is: other workers will call that URL."""
    if report.region:
        require_name(report.region, "ComponentReport.region")
    if report.relay and not _RELAY.fullmatch(report.relay):
        raise BadRequest(
            "ComponentReport.relay must be http(s)://HOST:PORT and nothing more, found " + repr(report.relay[:80])
        )


def require_numbers(request: Any) -> None:
    """Check that every number of a request can be a key: msgpack has integers of 65 bits, a database has not."""
    for field in type(request).__struct_fields__:
        value = getattr(request, field)
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise BadRequest(f"{type(request).__name__}.{field} must be an integer of 64 bits, found {value}")


def require_names(request: Any) -> None:
    """Check every name in a request, and its manifest if it has one."""
    kind = type(request).__name__
    for field in NAME_FIELDS:
        value = getattr(request, field, None)
        if value is not None:
            require_name(value, f"{kind}.{field}")
    manifest = getattr(request, "manifest", None)
    if manifest is not None:
        require_manifest(manifest)
    capabilities = getattr(request, "capabilities", None)
    for policy in capabilities.policies if capabilities is not None else ():
        require_name(policy, f"{kind}.capabilities.policies")
