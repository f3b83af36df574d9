"""Certificates given on the command line."""

from __future__ import annotations

import ssl
from pathlib import Path

from astraflow.errors import ConfigError


def server_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None without a certificate. Raises ConfigError when only one is given, or one cannot be read."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key belong together: give both or neither")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {cert} and --tls-key {key} cannot be used: {error}") from error
    return context
