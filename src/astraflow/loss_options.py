"""Which losses there are, the options of each with their ranges, and the columns they need. No torch.

A recipe is read by processes that have no torch, and a wrong option must be refused there, before anything starts.
The functions are in ``astraflow.losses``; a test holds their signatures against this table.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from astraflow.errors import ConfigError

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum_over_constant")
KL = ("k1_in_loss", "k2_in_loss", "k3_in_loss", "k3_weighted", "k1_in_reward", "k2_in_reward", "k3_in_reward")
LEVELS = ("token", "sequence", "geometric")
Value = float | str | bool | None
LARGEST = sys.float_info.max


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """An option that is a finite number in [low, high], without an open end; also None where that is the default."""

    default: float | None
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def problem(self, value: object) -> str | None:
        """What is wrong with ``value``, to be read after "must be", or None."""
        if value is None and self.default is None:
            return None
        # Compared, not asked whether it is finite: a whole number may be too large for that.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
            above = value > self.low if self.open_low else value >= self.low
            below = value < self.high if self.open_high else value <= self.high
            if above and below:
                return None
        return self._range()

    def _range(self) -> str:
        orelse = " or None" if self.default is None else ""
        if self.high == math.inf:
            return f"finite and {'>' if self.open_low else '>='} {self.low:g}{orelse}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}{orelse}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An option that is one of a few values."""

    default: str | bool | None
    among: tuple[str | bool | None, ...]

    def problem(self, value: object) -> str | None:
        if any(value is each or (value == each and type(value) is type(each)) for each in self.among):
            return None
        return f"one of {', '.join(str(each) for each in self.among)}"


Option = Number | Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """One loss."""

    options: Mapping[str, Option]
    needs: Mapping[str, str] = field(default_factory=dict)
    """Column of ``LossInputs`` → the option that asks for it while it is neither None nor 0; "" is always."""

    switches: Mapping[str, str] = field(default_factory=dict)
    """Option → the one without which it has no effect: while that is None, 0 or "none"."""
    by_proximal: Mapping[str, str] = field(default_factory=dict)
    """Option → the one that leaves it nothing but p / prox to act on, while it is set; "" is always. A batch is one
    step: the proximal policy, by whose log-probs it starts, is the current one."""

    def without_effect(self, given: Mapping[str, object]) -> str | None:
        """What was given for nothing, in words, or None."""
        for option, switch in self.switches.items():
            value = given.get(switch, self.options[switch].default)
            if option in given and value in (None, 0, "none"):
                return f"{option} {given[option]!r} has no effect where {switch} is {value!r}"
        return None

    def without_proximal(self, given: Mapping[str, object]) -> str | None:
        """What was given for nothing where prox is p, in words, or None."""
        for option, switch in self.by_proximal.items():
            if option in given and (not switch or given.get(switch, self.options[switch].default)):
                return f"{option} {given[option]!r} has no effect where a batch is one step: what it clips is always 1"
        return None

    def columns(self, given: Mapping[str, object]) -> dict[str, str]:
        """Of ``needs``, those that these options ask for."""
        asked = {name: given.get(name, option.default) for name, option in self.options.items()}
        return {column: option for column, option in self.needs.items() if not option or asked[option]}


def _aggregation(default: str, constant: float | None = None) -> dict[str, Option]:
    return {
        "aggregation": Choice(default=default, among=AGGREGATIONS),
        "constant": Number(default=constant, low=0, open_low=True),
    }


def _clip(low: float | None, high: float | None) -> dict[str, Option]:
    return {
        "clip_low": Number(default=low, low=0, high=1, open_high=True),
        "clip_high": Number(default=high, low=0),
    }


def _kl(default: str) -> dict[str, Option]:
    return {"kl": Choice(default=default, among=KL), "kl_coefficient": Number(default=0.0, low=0)}


_REFERENCE = {"reference_logprobs": "kl_coefficient"}
_SWITCHES = {"kl": "kl_coefficient"}
_CRITIC = {"values": "", "old_values": "", "returns": ""}

LOSSES: dict[str, LossSpec] = {
    "ppo": LossSpec(
        options={
            **_clip(0.2, None),
            "dual_clip": Number(default=None, low=1, open_low=True),
            **_kl("k1_in_reward"),
            "value_coefficient": Number(default=0.0, low=0),
            "value_clip": Number(default=None, low=0, open_low=True),
            **_aggregation("token_mean"),
        },
        needs={**_REFERENCE, **dict.fromkeys(_CRITIC, "value_coefficient")},
        switches={**_SWITCHES, "value_clip": "value_coefficient"},
    ),
    "grpo": LossSpec(
        options={**_clip(0.2, None), **_kl("k3_in_loss"), **_aggregation("token_mean")},
        needs=_REFERENCE,
        switches=_SWITCHES,
    ),
    "dr_grpo": LossSpec(
        options={**_clip(0.2, None), **_kl("k3_in_loss"), **_aggregation("sequence_sum_over_constant")},
        needs=_REFERENCE,
        switches=_SWITCHES,
    ),
    "dapo": LossSpec(
        options={**_clip(0.2, 0.28), **_kl("k3_in_loss"), **_aggregation("token_mean")},
        needs=_REFERENCE,
        switches=_SWITCHES,
    ),
    "gspo": LossSpec(
        options={
            "variant": Choice(default="sequence", among=("sequence", "token")),
            **_clip(3e-4, 4e-4),
            **_kl("k3_in_loss"),
            **_aggregation("sequence_mean"),
        },
        needs=_REFERENCE,
        switches=_SWITCHES,
    ),
    "cispo": LossSpec(
        options={**_clip(None, 4.0), **_kl("k3_in_loss"), **_aggregation("token_mean")},
        needs=_REFERENCE,
        switches=_SWITCHES,
    ),
    "rloo": LossSpec(
        options={
            "ratio": Choice(default="none", among=("none", "sequence")),
            **_clip(0.2, None),
            **_kl("k1_in_reward"),
            **_aggregation("sequence_sum_over_constant", 1.0),
        },
        needs=_REFERENCE,
        switches={**_SWITCHES, "clip_low": "ratio", "clip_high": "ratio"},
    ),
    "reinforce_plus_plus": LossSpec(
        options={**_clip(0.2, None), **_kl("k1_in_reward"), **_aggregation("token_mean")},
        needs=_REFERENCE,
        switches=_SWITCHES,
    ),
    "tis": LossSpec(
        options={
            "level": Choice(default="token", among=LEVELS),
            "cap": Number(default=2.0, low=1),
            **_clip(0.2, None),
            **_kl("k3_in_loss"),
            **_aggregation("token_mean"),
        },
        needs=_REFERENCE,
        switches=_SWITCHES,
        by_proximal=dict.fromkeys(_clip(0.2, None), ""),
    ),
    "mis": LossSpec(
        options={
            "level": Choice(default="token", among=LEVELS),
            "low": Number(default=0.5, low=0, high=1),
            "high": Number(default=5.0, low=1),
            **_clip(0.2, None),
            **_kl("k3_in_loss"),
            **_aggregation("token_mean"),
        },
        needs=_REFERENCE,
        switches=_SWITCHES,
        by_proximal=dict.fromkeys(_clip(0.2, None), ""),
    ),
    "sft": LossSpec(options=_aggregation("token_mean")),
    "decoupled_ppo": LossSpec(
        options={
            **_clip(0.2, None),
            "weight_cap": Number(default=5.0, low=1, open_low=True),
            "recompute": Choice(default=False, among=(False, True)),
            **_aggregation("token_mean"),
        },
        by_proximal=dict.fromkeys(_clip(0.2, None), "recompute"),
    ),
    "m2po": LossSpec(options={"budget": Number(default=0.04, low=0), **_aggregation("token_mean")}),
    "topr": LossSpec(
        options={"negative_cap": Number(default=1.0, low=0), **_aggregation("sequence_sum_over_constant", 1.0)}
    ),
    "sapo": LossSpec(
        options={
            "temperature_positive": Number(default=1.0, low=0, open_low=True),
            "temperature_negative": Number(default=1.05, low=0, open_low=True),
            **_aggregation("sequence_mean"),
        }
    ),
    "online_dpo": LossSpec(
        options={"beta": Number(default=0.1, low=0, open_low=True)}, needs={"reference_logprobs": ""}
    ),
    "vapo": LossSpec(
        options={
            **_clip(0.2, 0.28),
            "nll_weight": Number(default=0.1, low=0),
            "positive_above": Number(default=0.0),
            "value_weight": Number(default=1.0, low=0),
            "value_clip": Number(default=None, low=0, open_low=True),
            **_aggregation("token_mean"),
        },
        needs=_CRITIC,
    ),
    "value_pretraining": LossSpec(options=_aggregation("token_mean"), needs=_CRITIC),
    "kimi": LossSpec(options={"tau": Number(default=0.1, low=0), **_aggregation("sequence_sum_over_constant", 1.0)}),
}
"""Name → what it takes. A new loss adds a line here and one in ``losses.choose``."""


def spec_of(loss: str) -> LossSpec:
    """Raises ConfigError that names the nearest loss."""
    if loss not in LOSSES:
        raise ConfigError(f"loss {loss!r} is unknown{_nearest(loss, LOSSES)}; there are {', '.join(sorted(LOSSES))}")
    return LOSSES[loss]


def check_options(loss: str, given: Mapping[str, object]) -> None:
    """Raises ConfigError: an option that ``loss`` does not have (with the nearest it has), or a value out of range."""
    options = spec_of(loss).options
    for name, value in given.items():
        if name not in options:
            raise ConfigError(
                f"loss {loss!r} has no option {name!r}{_nearest(name, options)}; it has {', '.join(options)}"
            )
        problem = options[name].problem(value)
        if problem:
            raise ConfigError(f"loss {loss!r}: {name} must be {problem}, found {value!r}")
    _check_constant(loss, {name: given.get(name, option.default) for name, option in options.items()})


def _check_constant(loss: str, full: Mapping[str, object]) -> None:
    """Two options that contradict each other are both named (F98)."""
    if full.get("aggregation") == "sequence_sum_over_constant" and full.get("constant") is None:
        raise ConfigError(
            f"loss {loss!r}: aggregation 'sequence_sum_over_constant' needs constant > 0, found constant None"
        )


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
