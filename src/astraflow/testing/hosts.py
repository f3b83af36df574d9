"""Hosts on one machine: network namespaces around one in the middle, joined by lines with delay, rate, loss and cuts.

    with Hosts() as hosts:
        far = hosts.add("eu", Line(rtt_s=0.3, rate_mbit=50))
        subprocess.run(far.command(["curl", f"http://{far.home_address}:7700"]))
        hosts.shape("eu", Line(cut=True))

A line is a veth pair under ``tc netem`` where the kernel has that, else two TUN devices whose packets wait in user
space (``userspace_link``); ``Hosts.kind`` says which. Needs root; whatever it made goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Literal

from astraflow.errors import ConfigError, RunFailed
from astraflow.testing.userspace_link import TUN, Line, open_tun

Kind = Literal["netem", "userspace"]
HOME = "home"
PREFIX = "astraflow"
COMMAND_S = 30.0
FAST_MBIT = 500.0
"""From here on packets are as large as a device takes: they are carried one by one."""
BUFFER_BYTES = 256 << 20
"""Of TCP at most: 4 Gbit/s × 0.3 s are 150 MB on their way."""


def missing() -> str:
    """Why there can be no hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "needs hardware: root, for network namespaces"
    if which("ip") is None or which("tc") is None:
        return "iproute2, which is not installed (apt-get install iproute2)"
    return "" if has_netem() or Path(TUN).exists() else f"needs hardware: a kernel with sch_netem or {TUN}"


def has_netem() -> bool:
    """Whether the kernel has it; asked with a device of its own."""
    name = f"{PREFIX}-{os.getpid()}-try"
    _run("ip", "netns", "add", name)
    try:
        return _tried("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    finally:
        _run("ip", "netns", "del", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One namespace."""

    name: str
    namespace: str
    address: str
    """Of this host, for the others."""
    home_address: str
    """Of the one in the middle, for this one."""

    def command(self, words: Sequence[str]) -> list[str]:
        """These words as a program of this host: the same files and processes, another network."""
        return ["ip", "netns", "exec", self.namespace, *words]


@dataclass(kw_only=True, slots=True)
class _Joined:
    host: Host
    line: Line
    pump: subprocess.Popen[bytes] | None = None
    counted: dict[str, int] = field(default_factory=dict)


class Hosts:
    """A context: inside, ``add`` hosts around ``home``, and ``shape`` their lines."""

    def __init__(self, kind: Kind | None = None) -> None:
        """``kind``: of the lines; left out, netem where the kernel has it."""
        self.kind: Kind = kind or ("netem" if has_netem() else "userspace")
        self._prefix = f"{PREFIX}-{os.getpid()}-{id(self) % 10_000}"
        self._joined: dict[str, _Joined] = {}
        self.home = Host(name=HOME, namespace=f"{self._prefix}-{HOME}", address="127.0.0.1", home_address="127.0.0.1")

    def __enter__(self) -> Hosts:
        _sweep()
        self._make(self.home)
        _inside(self.home, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._joined.values():
            _end(each.pump)
        for host in [*(each.host for each in self._joined.values()), self.home]:
            _tried("ip", "netns", "del", host.namespace)

    def add(self, name: str, line: Line) -> Host:
        """A further host, joined to home by a line; it reaches the other ones through home."""
        if name in self._joined or name == HOME:
            raise ConfigError(f"there is a host {name!r} already")
        number = len(self._joined) + 1
        here, there = f"10.77.{number}.1", f"10.77.{number}.2"
        host = Host(name=name, namespace=f"{self._prefix}-{name}", address=there, home_address=here)
        self._make(host)
        joined = self._joined[name] = _Joined(host=host, line=line)
        near, far = f"af{number}h-{os.getpid()}"[:15], f"af{number}f-{os.getpid()}"[:15]
        if self.kind == "netem":
            _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            self._up(near, self.home, here, line)
            self._up(far, host, there, line)
        else:
            ends = (open_tun(near), open_tun(far))
            try:
                self._up(near, self.home, here, line)
                self._up(far, host, there, line)
                joined.pump = _pump(ends)
            finally:
                for end in ends:
                    os.close(end)
        _inside(host, "ip", "route", "add", "default", "via", here)
        self.shape(name, line)
        return host

    def shape(self, name: str, line: Line) -> None:
        """From now on the line is like this."""
        joined = self._joined[name]
        joined.line = line
        if joined.pump is not None:
            joined.counted = _tell(joined.pump, line)
            return
        number = list(self._joined).index(name) + 1
        for host, side in ((self.home, "h"), (joined.host, "f")):
            device = f"af{number}{side}-{os.getpid()}"[:15]
            _inside(host, *netem(device, line))

    def counted(self, name: str) -> dict[str, int]:
        """Packets passed, lost and overflowed so far; of lines in user space."""
        self.shape(name, self._joined[name].line)
        return self._joined[name].counted

    def _make(self, host: Host) -> None:
        _run("ip", "netns", "add", host.namespace)
        _inside(host, "ip", "link", "set", "lo", "up")
        for name in ("tcp_rmem", "tcp_wmem"):
            _inside(host, "sh", "-c", f"echo '4096 131072 {BUFFER_BYTES}' > /proc/sys/net/ipv4/{name}")

    def _up(self, device: str, host: Host, address: str, line: Line) -> None:
        _run("ip", "link", "set", device, "netns", host.namespace)
        fast = line.rate_mbit is None or line.rate_mbit >= FAST_MBIT
        if fast and self.kind == "userspace":
            _inside(host, "ip", "link", "set", device, "mtu", "65000")
        _inside(host, "ip", "addr", "add", f"{address}/30", "dev", device)
        _inside(host, "ip", "link", "set", device, "txqueuelen", "10000", "up")


def netem(device: str, line: Line) -> list[str]:
    """The words that make a device send as the line does; half of the delay on each side."""
    words = ["tc", "qdisc", "replace", "dev", device, "root", "netem", "limit", "100000"]
    words += ["delay", f"{line.rtt_s * 500:g}ms"] if line.rtt_s else []
    words += ["loss", f"{100.0 if line.cut else line.loss * 100:g}%"] if line.cut or line.loss else []
    return words + (["rate", f"{line.rate_mbit:g}mbit"] if line.rate_mbit is not None else [])


# ── the pump ──


def _pump(ends: tuple[int, int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "astraflow.testing.userspace_link", *map(str, ends)],
        pass_fds=ends,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # who interrupts a test at the keyboard does not cut its lines first
    )


def _tell(pump: subprocess.Popen[bytes], line: Line) -> dict[str, int]:
    assert pump.stdin is not None and pump.stdout is not None
    pump.stdin.write(line.encode())
    pump.stdin.flush()
    answer = pump.stdout.readline()
    if not answer:
        raise RunFailed(f"the line's process has ended with {pump.wait(COMMAND_S)}: see its standard error")
    counted: dict[str, int] = json.loads(answer)
    return counted


def _end(pump: subprocess.Popen[bytes] | None) -> None:
    if pump is None:
        return
    assert pump.stdin is not None and pump.stdout is not None
    pump.stdin.close()
    try:
        pump.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        pump.kill()
        pump.wait()
    pump.stdout.close()


# ── commands ──


def _sweep() -> None:
    """Remove what a process left that was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S, check=True)
    for words in map(str.split, listed.stdout.splitlines()):
        parts = words[0].split("-") if words else []
        if len(parts) > 2 and parts[0] == PREFIX and parts[1].isdigit() and not Path(f"/proc/{parts[1]}").exists():
            with contextlib.suppress(RunFailed):  # somebody else sweeps, too
                _run("ip", "netns", "del", words[0])


def _inside(host: Host, *words: str) -> None:
    _run(*host.command(words))


def _tried(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, timeout=COMMAND_S, check=False).returncode == 0


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RunFailed(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[:300]}")
