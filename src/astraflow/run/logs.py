"""Log lines of a service process: time, level, event with key=value, to standard error (the launcher's logs/)."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import sys


def configure_logging() -> None:
    """``ASTRAFLOW_LOG`` sets the level of AstraFlow's own loggers; other libraries speak from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("astraflow").setLevel(os.environ.get("ASTRAFLOW_LOG", "INFO").upper())


def process_name(kind: str) -> str:
    """For a worker that nobody named: unique, and a word that the wire accepts."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    return f"{kind}-{host}-{os.getpid()}"


def incarnation() -> str:
    """Random per process start."""
    return secrets.token_hex(8)
