"""Carries faults out: signals, and what happens to network and ports of the namespaces the soak runs in."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from faults import Fault
from processes import Member

_SLOWEST = "8kbit"  # of the loopback while it is stalled


class Points:
    """The traps of points/sitecustomize.py: which have closed, and steps at which whoever comes first stops.

    Processes say in the file ``folder``/points that they have gone into a trap, right before they die or stop.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at = 0

    def closed(self) -> Iterator[tuple[int, str, int]]:
        """(process, point, signal) of each since the last look."""
        try:
            data = (self._folder / "points").read_bytes()[self._at :]
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._at += end
        for line in data[:end].decode().splitlines():
            pid, point, number = line.split()
            yield int(pid), point, int(number)

    def stop_at(self, point: str) -> None:
        """The next process that comes to this step in Python stops there."""
        (self._folder / f"stop.{point}").touch()

    def end(self) -> None:
        """Processes that start from now on have no trap, and nobody waits for anybody to stop."""
        for waiting in self._folder.glob("stop.*"):
            waiting.unlink(missing_ok=True)
        (self._folder / "points.off").touch()


class FaultInjector:
    """What is wrong at the moment, and when it ends.

    Args:
        network: whether the loopback is the soak's own.
    """

    def __init__(self, network: bool) -> None:
        self._network = network
        self.counts: Counter[str] = Counter()
        self._stopped: dict[int, float] = {}  # pid → when it goes on
        self._port_holders: list[tuple[float, socket.socket]] = []
        self._wanted_ports: list[tuple[float, float, int]] = []
        self._stalled_until = 0.0

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of faults that can be done here."""
        network = {"cut", "stall"} if self._network else set()
        return frozenset({"kill", "stop", "lapse", "port"} | network)

    @property
    def quiet(self) -> bool:
        """Nothing is wrong now that ends by itself."""
        return not (self._stopped or self._port_holders or self._wanted_ports or self._stalled_until)

    def has_stopped(self, pid: int) -> bool:
        """Whether the process was stopped here."""
        return pid in self._stopped

    def kill(self, member: Member) -> None:
        """SIGKILL, also to one that is stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
            self.counts[f"kill {member.role}"] += 1
        self._stopped.pop(member.pid, None)

    @property
    def kills(self) -> int:
        """All there were, those at fault points included."""
        return sum(count for name, count in self.counts.items() if name.startswith("kill "))

    def closed(self, pid: int, point: str, number: int, seconds: float) -> None:
        """A process has gone into its trap: it is dead, or goes on after ``seconds``."""
        self.counts[f"point {point}"] += 1
        if number == signal.SIGSTOP:
            self.counts["stop at a point"] += 1
            self._stopped[pid] = time.monotonic() + seconds
        else:
            self.counts["kill at a point"] += 1

    def stop(self, member: Member, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGSTOP)
            self.counts[f"stop {member.role}"] += 1
            self._stopped[member.pid] = time.monotonic() + seconds

    def take_port(self, listener: Member, port: int, seconds: float) -> None:
        """Kill a listener and have its port before it is back."""
        self.kill(listener)
        now = time.monotonic()
        self._wanted_ports.append((now + 5.0, seconds, port))

    def cut(self, fault: Fault) -> None:
        """Reset one TCP connection, or all there are."""
        listed = subprocess.run(["ss", "-tnH", "state", "established"], capture_output=True, text=True).stdout
        pairs = re.findall(r"(\S+):(\d+)\s+(\S+):(\d+)\s*$", listed, re.MULTILINE)
        if not pairs:
            return
        which: list[str] = []
        if fault.choice < 0.7:
            _, source, _, target = pairs[int(fault.choice / 0.7 * len(pairs))]
            which = ["sport", "=", f":{source}", "and", "dport", "=", f":{target}"]
        subprocess.run(["ss", "-K", "-tnH", "state", "established", *which], capture_output=True)
        self.counts["cut one" if which else "cut all"] += 1

    def stall(self, seconds: float) -> None:
        """Let (almost) nothing through the loopback for a time."""
        if not self._stalled_until:
            subprocess.run([*_tc("add"), "tbf", "rate", _SLOWEST, "burst", "16k", "limit", "64k"], check=True)
            self.counts["stall"] += 1
        self._stalled_until = time.monotonic() + seconds

    def tend(self) -> None:
        """End what is over; call it often."""
        now = time.monotonic()
        for pid in [pid for pid, until in self._stopped.items() if now >= until]:
            del self._stopped[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._take_ports(now)
        for until, holder in list(self._port_holders):
            if now >= until:
                holder.close()
                self._port_holders.remove((until, holder))
        if self._stalled_until and now >= self._stalled_until:
            subprocess.run(_tc("del"), check=True)
            self._stalled_until = 0.0

    def _take_ports(self, now: float) -> None:
        for wanted in list(self._wanted_ports):
            give_up, seconds, port = wanted
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind(("0.0.0.0", port))
                holder.listen()
            except OSError:
                holder.close()
                if now > give_up:  # its listener was faster
                    self._wanted_ports.remove(wanted)
                continue
            self.counts["port taken"] += 1
            self._wanted_ports.remove(wanted)
            self._port_holders.append((now + seconds, holder))

    def end_all(self) -> None:
        """Everything that is wrong ends now."""
        self._stopped = dict.fromkeys(self._stopped, 0.0)
        self._port_holders = [(0.0, holder) for _, holder in self._port_holders]
        self._wanted_ports.clear()
        self._stalled_until = min(self._stalled_until, 1e-9)
        self.tend()


def _tc(verb: str) -> list[str]:
    return ["tc", "qdisc", verb, "dev", "lo", "root"]
