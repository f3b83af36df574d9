"""Who watches a run hears of a dataflow that does not answer."""

from __future__ import annotations

from pathlib import Path

from astraflow.run.silence import Silence

LOG = Path("d.log")


def test_a_silence_is_said_once_and_so_is_its_end() -> None:
    silence = Silence(heard_at=100.0)
    said = [silence.see(at, answered=False, log=LOG) for at in (105.0, 114.9, 115.0, 140.0)]
    assert said == [
        None,
        None,
        "dataflow has not answered for 15 s: it is stopped (SIGSTOP), or the machine is too busy; look into d.log",
        None,
    ]
    assert silence.see(141.0, answered=True, log=LOG) == "dataflow answers again"
    assert silence.see(142.0, answered=True, log=LOG) is None
    assert silence.see(150.0, answered=False, log=LOG) is None, "heard 8 s ago"
