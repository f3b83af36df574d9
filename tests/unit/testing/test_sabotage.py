"""What is switched off in a process of its own: here nothing must change."""

from __future__ import annotations

import subprocess
import sys

import pytest

from astraflow.errors import ConfigError
from astraflow.testing.sabotage import SWITCHES, switch_off

CODE = """
from astraflow.dataflow.batches import Batches
from astraflow.dataflow.policies import Policies
from astraflow.testing.sabotage import switch_off
switch_off({what!r})
print(Batches.undo(None, 0.0, "p", 3) if {what!r} == "uncommit" else Policies.require_epoch(None, "p", -1))
"""


@pytest.mark.parametrize(("what", "answer"), [("uncommit", "()"), ("fencing", "None")])
def test_it_is_off(what: str, answer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(what=what)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == answer


def test_only_what_is_named() -> None:
    assert set(SWITCHES) == {"uncommit", "fencing"}
    with pytest.raises(ConfigError, match="uncommit, fencing"):
        switch_off("everything")
