"""Hosts and the lines between them. Bounds are such that a slow machine passes too: a line never hurries."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from astraflow.errors import ConfigError
from astraflow.testing.hosts import Host, Hosts, has_netem, missing, netem
from astraflow.testing.userspace_link import QUEUE_S, Line, Way

MEGABYTES = 3
SERVE = """
import socket, sys
listening = socket.create_server(("0.0.0.0", 7000))
print("up", flush=True)
while True:
    connection, _ = listening.accept()
    wanted = int(connection.recv(16))
    connection.sendall(bytes(wanted))
    connection.close()
"""
FETCH = """
import json, socket, sys, time
began = time.monotonic()
connection = socket.create_connection((sys.argv[1], 7000), timeout=60)
connected = time.monotonic() - began
connection.sendall(sys.argv[2].encode())
count = 0
while piece := connection.recv(1 << 20):
    count += len(piece)
print(json.dumps({"connected": connected, "count": count, "took": time.monotonic() - began}))
"""


# ── one way of a line, without any device ──


def way(**line: float) -> Way:
    return Way(Line(**line), random.Random(0))


def test_a_packet_arrives_after_half_of_the_round_trip_and_its_own_length() -> None:
    found = way(rtt_s=0.3, rate_mbit=8.0)
    found.put(10.0, bytes(1000))  # a millisecond
    found.put(10.0, bytes(2000))
    assert found.next_at() == pytest.approx(10.151)
    assert found.take(10.15) == []
    assert [len(each) for each in found.take(10.152)] == [1000]
    assert [len(each) for each in found.take(10.1531)] == [2000]
    assert found.next_at() is None and found.passed == 2


def test_one_packet_in_a_hundred_is_lost() -> None:
    found = way(loss=0.01)
    for _ in range(20_000):
        found.put(0.0, b"x")
    assert found.lost == pytest.approx(200, rel=0.3)
    assert len(found.take(0.0)) == 20_000 - found.lost


def test_a_cut_line_loses_everything_and_a_full_queue_what_comes_then() -> None:
    found = way(rate_mbit=1.0)
    for _ in range(1000):
        found.put(0.0, bytes(1250))  # 10 ms each
    assert found.overflowed == pytest.approx(1000 - QUEUE_S * 100, abs=2)
    found.line = Line(cut=True)
    found.put(0.0, b"x")
    assert found.lost == 1
    assert len(found.take(1e9)) == 1000 - found.overflowed  # what is on its way arrives


def test_nobody_overtakes_when_a_line_becomes_shorter() -> None:
    found = way(rtt_s=2.0)
    found.put(0.0, b"first")
    found.line = Line()
    found.put(0.1, b"second")
    assert found.take(0.5) == []
    assert found.take(1.0) == [b"first", b"second"]


@pytest.mark.parametrize("wrong", [{"rtt_s": -1.0}, {"rate_mbit": 0.0}, {"loss": 1.5}, {"rate_mbit": float("nan")}])
def test_a_line_that_there_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="found"):
        Line(**wrong)


def test_the_words_of_netem() -> None:
    line = netem("x", Line(rtt_s=0.3, rate_mbit=50.0, loss=0.01))
    assert line[:7] == ["tc", "qdisc", "replace", "dev", "x", "root", "netem"]
    assert line[7:] == ["limit", "100000", "delay", "150ms", "loss", "1%", "rate", "50mbit"]
    assert netem("x", Line(cut=True))[-2:] == ["loss", "100%"]


# ── hosts ──


@pytest.fixture(scope="module")
def tools() -> None:
    """Skips only where there can be none."""
    if os.geteuid() == 0 and (which("ip") is None or which("tc") is None):
        subprocess.run(["apt-get", "install", "-y", "iproute2"], check=True, capture_output=True, timeout=100)
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(params=["userspace", "netem"])
def hosts(request: pytest.FixtureRequest, tools: None) -> Iterator[Hosts]:
    if request.param == "netem" and not has_netem():
        pytest.skip("needs hardware: a kernel with sch_netem")
    with Hosts(request.param) as made:
        yield made


def fetch(hosts: Hosts, host: Host, count: int) -> dict[str, float]:
    """From home to the host."""
    server = subprocess.Popen(hosts.home.command([sys.executable, "-c", SERVE]), stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"
        done = subprocess.run(
            host.command([sys.executable, "-c", FETCH, host.home_address, str(count)]),
            capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
        found: dict[str, float] = json.loads(done.stdout)
        assert found["count"] == count
        return found
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def test_delay_and_rate_of_a_line(hosts: Hosts) -> None:
    far = hosts.add("eu", Line(rtt_s=0.3, rate_mbit=50.0))
    found = fetch(hosts, far, MEGABYTES << 20)
    assert found["connected"] >= 0.3
    assert found["took"] >= 0.6 + (MEGABYTES << 23) / 50e6  # connect, ask and get


def test_lost_packets_are_sent_again_and_other_hosts_are_reached_through_home(hosts: Hosts) -> None:
    far = hosts.add("eu", Line(loss=0.05, rate_mbit=100.0))
    other = hosts.add("us", Line(rtt_s=0.05))
    fetch(hosts, far, 1 << 20)
    if hosts.kind == "userspace":
        counted = hosts.counted("eu")
        assert counted["lost"] > 0 and counted["passed"] > 500
    ping = far.command(
        [sys.executable, "-c", f"import socket; socket.create_connection(({other.address!r}, 9), timeout=30)"]
    )
    done = subprocess.run(ping, capture_output=True, text=True, timeout=60, check=False)
    assert "ConnectionRefusedError" in done.stderr  # by that host itself: nobody listens there


def test_a_cut_holds_what_is_sent_until_the_line_is_whole_again(hosts: Hosts) -> None:
    far = hosts.add("eu", Line())
    hosts.shape("eu", Line(cut=True))
    began = time.monotonic()
    asks = subprocess.Popen(
        far.command([sys.executable, "-c", FETCH, far.home_address, "1000"]), stdout=subprocess.PIPE
    )
    server = subprocess.Popen(hosts.home.command([sys.executable, "-c", SERVE]), stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"
        with pytest.raises(subprocess.TimeoutExpired):
            asks.wait(1.0)
        hosts.shape("eu", Line())
        answer, _ = asks.communicate(timeout=60)
        assert json.loads(answer)["count"] == 1000 and time.monotonic() - began >= 1.0
    finally:
        for process in (asks, server):
            process.kill()
            process.wait()
        assert server.stdout is not None
        server.stdout.close()


def test_nothing_is_left(tools: None) -> None:
    with Hosts("userspace") as hosts:
        hosts.add("eu", Line())
        with pytest.raises(ConfigError, match="already"):
            hosts.add("eu", Line())
        names = [hosts.home.namespace, f"{hosts.home.namespace.removesuffix('home')}eu"]
        assert all(Path(f"/run/netns/{name}").exists() for name in names)
    assert not any(Path(f"/run/netns/{name}").exists() for name in names)


def test_the_words_of_netem_are_understood_by_tc(tools: None) -> None:
    """By the program itself; the kernel may then say that it has no netem."""
    with Hosts("userspace") as hosts:
        words = netem("lo", Line(rtt_s=0.3, rate_mbit=4000.0, loss=0.01))
        done = subprocess.run(hosts.home.command(words), capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0 or "qdisc kind is unknown" in done.stderr, done.stderr
        wrong = [*words, "nonsense"]
        done = subprocess.run(hosts.home.command(wrong), capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode != 0 and "qdisc kind is unknown" not in done.stderr
