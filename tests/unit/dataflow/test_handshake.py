"""A process of another config or code is refused, and told which settings differ."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from astraflow.dataflow.handshake import PATH_CHARS, SHOWN, VALUE_CHARS, differences, require_same
from astraflow.errors import ConfigMismatch
from astraflow.wire import messages as m
from tests.unit.dataflow.rig import Rig, make_spec

RUN = {"rollout.sampling.temperature": "0.7", "policies.main.model": '"tiny"', "steps": "4", "tasks.digest": '"a1"'}
SPEC = replace(make_spec(), config_digest="c" * 64, code_digest="k" * 64, config=RUN)
HELLO = m.HelloRequest(
    component="trainer", name="t", incarnation="1", config_digest="x" * 64, code_digest="k" * 64, config=RUN
)


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigMismatch) as caught:
        require_same(SPEC, msgspec.structs.replace(HELLO, **changes))
    return str(caught.value)


def test_f99_a_refusal_names_the_settings_that_differ_with_both_values() -> None:
    other = {**RUN, "rollout.sampling.temperature": "1.0", "steps": "5", "seed": "3"}
    del other["tasks.digest"]
    assert refusal(config=other) == (
        f"trainer 't' has config {'x' * 12}, run {SPEC.run} has {'c' * 12}: start it from the same config; "
        "what differs: rollout.sampling.temperature is 0.7 in the run, 1.0 there; seed is absent in the run, 3 there; "
        'steps is 4 in the run, 5 there; tasks.digest is "a1" in the run, absent there'
    )


def test_f99_over_the_whole_call_and_nobody_has_joined() -> None:
    with Rig(SPEC) as rig:
        other = msgspec.structs.replace(HELLO, config={**RUN, "steps": "5"})
        with pytest.raises(ConfigMismatch, match=r"what differs: steps is 4 in the run, 5 there$"):
            rig.go(rig.flow.hello(other))
        assert not rig.service.ledger.components.all()
        same = msgspec.structs.replace(HELLO, config_digest="c" * 64)
        assert rig.go(rig.flow.hello(same)).config_digest == "c" * 64


@pytest.mark.parametrize("config", [{}, RUN])
def test_f99_without_anything_to_compare_the_digests_are_named(config: dict[str, str]) -> None:
    """Of an older program, or of one whose digest has another cause."""
    assert refusal(config=config).endswith("start it from the same config")


def test_f99_the_digest_decides_not_the_settings() -> None:
    require_same(SPEC, msgspec.structs.replace(HELLO, config_digest="c" * 64, config={"steps": "5"}))


def test_other_code_is_told_apart_from_another_config() -> None:
    words = refusal(config_digest="c" * 64, code_digest="y" * 64, config={"steps": "5"})
    assert words.endswith("start it from the same code") and "differs" not in words


def test_the_message_is_one_bounded_line_whatever_was_sent() -> None:
    hostile = {f"{n}\n{'p' * 5000}": "\n" + "v" * 100_000 for n in range(5000)}
    words = differences(RUN, hostile)
    assert "\n" not in words
    assert len(words) < SHOWN * (PATH_CHARS + 2 * VALUE_CHARS + 40) + 60
    assert words.endswith(f"; and {5000 + len(RUN) - SHOWN} more")


def test_no_difference_is_no_words() -> None:
    assert differences(RUN, dict(RUN)) == ""


@pytest.mark.parametrize(
    ("what", "wrong"), [("config_digest", ""), ("config_digest", "x" * 64), ("code_digest", "y" * 64)]
)
def test_who_asks_for_work_without_a_word_before_is_looked_at_all_the_same(what: str, wrong: str) -> None:
    with Rig(SPEC) as rig:
        can = m.Capabilities(policies=("p",), config_digest="c" * 64, code_digest="k" * 64)
        other = msgspec.structs.replace(can, **{what: wrong})
        with pytest.raises(ConfigMismatch, match=f"rollout 'evil' has {what[:4]}"):
            rig.go(rig.flow.lease(m.LeaseRequest(worker="evil", incarnation="1", count=1, capabilities=other)))
        assert not rig.service.ledger.components.all(), "nobody has joined"
        assert rig.go(rig.flow.lease(m.LeaseRequest(worker="w", incarnation="1", count=1, capabilities=can))).leases
