"""Where built models lie. No torch: every process may ask."""

from __future__ import annotations

import os
from pathlib import Path

from astraflow.errors import ConfigError

OTHER_CACHE = "set ASTRAFLOW_CACHE to another folder"


def cache_folder() -> Path:
    """``$ASTRAFLOW_CACHE``, else ``~/.cache/astraflow/models``."""
    return Path(os.environ.get("ASTRAFLOW_CACHE") or Path.home() / ".cache" / "astraflow" / "models")


def require_model_folder(folder: Path, *, what: str) -> Path:
    """Raises ConfigError, with what to do, unless the folder looks like a Hugging Face model."""
    if not folder.is_dir():
        raise ConfigError(
            f"{what}: there is no folder {folder}; name one, or build one by 'astraflow models get smollm2'"
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).exists()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"{what}: folder {folder} is no complete model, it lacks {', '.join(missing)}")
    return folder
