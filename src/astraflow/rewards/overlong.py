"""A penalty that grows with the last tokens before the limit: long replies are told so before they are cut.

Source: Yu et al. 2025, "DAPO", arXiv 2503.14476, equation 13 (soft overlong punishment).
"""

from __future__ import annotations

import math

from astraflow.errors import ConfigError


class SoftOverlong:
    """``(reward, tokens of the reply) → reward``, which is less by up to ``weight`` close to ``longest`` tokens.

    Nothing up to ``longest - buffer`` tokens, then linear, and all of it from ``longest`` on.
    """

    def __init__(self, *, longest: int, buffer: int, weight: float = 1.0) -> None:
        """``longest``: as a rule ``sampling.max_tokens``; the paper's: 20480, buffer 4096, weight 1."""
        if longest < 1:
            raise ConfigError(f"SoftOverlong.longest must be at least 1, found {longest}")
        if not 1 <= buffer <= longest:
            raise ConfigError(f"SoftOverlong.buffer must be in [1, longest {longest}], found {buffer}")
        if not 0 <= weight < math.inf:
            raise ConfigError(f"SoftOverlong.weight must be finite and >= 0, found {weight}")
        self.longest = longest
        self.buffer = buffer
        self.weight = weight

    def __call__(self, reward: float, tokens: int) -> float:
        over = tokens - (self.longest - self.buffer)
        return reward - self.weight * min(1.0, max(0, over) / self.buffer)
