"""What may be chosen about the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

from astraflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    slots: int = 64
    """Sequences that decode together."""
    max_context: int = 0
    """Longest prompt + reply in tokens. 0: what the model was made for."""
    dtype: str = "auto"
    """``float32``, ``bfloat16``, ``float16`` or ``auto``: the dtype of the model folder, on a CPU that multiplies
    it in hardware, else float32."""
    device: str = "auto"
    """``auto``: the GPU if there is one, else the CPU."""
    prefill_chunk: int = 256
    """Prompt tokens computed beside one decode step, all prompts together."""
    prefix_cache: int = 4096
    """Tokens of finished sequences kept for later prompts that begin with them, beside those still in the slots."""
    kv_on_update: str = "keep"
    """What running sequences do with the past when weights change: ``keep`` it or ``recompute`` it."""
    versions_held: int = 1
    """Weight sets in memory: 2 lets a request name an older version while the newest moves on."""
    end_ids: tuple[int, ...] | None = None
    """Tokens that end every reply. None: those of the model folder's generation config."""
    threads: int = 0
    """Torch threads of a decode step. 0: the launcher's share or all cores, whichever is faster at the moment."""
    max_waiting: int = 65536
    """Requests waiting for a slot before further ones are refused as ``Unavailable``."""
    pin_wait_s: float = 600.0
    """Longest wait of a load for requests that name the version that it would replace."""

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("prefill_chunk", 1), ("versions_held", 1), ("max_waiting", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"EngineSettings.{name} must be at least {least}, found {getattr(self, name)}")
        for name in ("max_context", "prefix_cache", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"EngineSettings.{name} must be at least 0, found {getattr(self, name)}")
        if self.kv_on_update not in ("keep", "recompute"):
            raise ConfigError(f"EngineSettings.kv_on_update must be 'keep' or 'recompute', found {self.kv_on_update!r}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"EngineSettings.dtype must be auto, float32, bfloat16 or float16, found {self.dtype!r}")
