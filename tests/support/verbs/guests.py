"""Two virtual machines of one tree, joined by two links: one for payloads, with software RoCE, one for commands.

The host reaches each of them by ssh through a port of its loopback, and nothing else of them is reachable.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tree import INITRD, TREE, WORK

_CONSOLE = "console=ttyS0 panic=-1 edd=off mitigations=off no_timer_check"
_BOOT_S = 300.0
_PROBE_S = 15.0
# What runs a guest's instructions. COUNTED is TCG with a clock by which each of them takes a nanosecond, whatever else
# the host does: its figures are the same in each run.
COUNTED = "counted"
_KINDS = {
    "kvm": ["-accel", "kvm"],
    "tcg": ["-accel", "tcg,thread=multi"],
    COUNTED: ["-accel", "tcg,thread=single", "-icount", "shift=0"],
}


def accelerator() -> str:
    """KVM where it runs Debian's kernel, else TCG. Some machines have a /dev/kvm whose guests need another kernel."""
    remembered = WORK / "accelerator"
    if not remembered.exists():
        remembered.write_text("kvm" if _kvm_boots() else "tcg")
    return remembered.read_text()


def _kvm_boots() -> bool:
    """Whether a kernel without a root directory gets as far as to say so."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    console = WORK / "kvm.log"
    command = [
        "qemu-system-x86_64",
        *_machine("kvm", 1, "256M", f"{_CONSOLE} earlyprintk=ttyS0"),
        "-serial",
        f"file:{console}",
    ]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, timeout=_PROBE_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return console.exists() and "Linux version" in console.read_text(errors="replace")


def _machine(kind: str, processors: int, memory: str, line: str) -> list[str]:
    (kernel,) = (TREE / "kernel" / "boot").glob("vmlinuz-*")
    words = [
        *_KINDS[kind],
        "-cpu",
        "max",
        "-smp",
        str(processors),
        "-m",
        memory,
        "-nodefaults",
        "-display",
        "none",
    ]
    words += ["-machine", "pc,i8042=off"]
    return [*words, "-no-reboot", "-kernel", str(kernel), "-initrd", str(INITRD), "-append", line]


def _clock(kind: str) -> str:
    """What the guest's kernel is told of its clock. It would measure the processor's counter while others use the
    processor, and its seconds would be a fifth of a second."""
    if kind == "kvm":
        return ""
    if kind == COUNTED:
        return "tsc=reliable tsc_early_khz=1000000"
    cpu = Path("/proc/cpuinfo").read_text()
    known = re.search(r"^cpu MHz\s*: (\d+)\.(\d{3})", cpu, re.MULTILINE) if "tsc_known_freq" in cpu else None
    return f"tsc=reliable tsc_early_khz={known[1]}{known[2]}" if known else "clocksource=hpet"


def _link(name: str, number: int) -> list[str]:
    """A network interface at either end of a socket."""
    end = f"stream,id={name},server={'on' if number == 1 else 'off'},addr.type=unix,addr.path={WORK / name}.socket"
    return ["-netdev", end, "-device", f"virtio-net-pci,netdev={name},mac=52:54:00:00:{name[-1]}{number}:01"]


class Guest:
    """One of the two, while it runs."""

    def __init__(self, number: int, kind: str, processors: int, memory: str) -> None:
        self.number = number
        self._console = WORK / f"guest{number}.log"
        self._console.unlink(missing_ok=True)
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            self.port = bound.getsockname()[1]
        forward = f"user,id=host,restrict=on,net=10.0.{number}.0/24,hostfwd=tcp:127.0.0.1:{self.port}-:22"
        command = [
            *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"),
            *_machine(kind, processors, memory, f"{_CONSOLE} {_clock(kind)} quiet guest={number}"),
            *("-virtfs", f"local,path={TREE},mount_tag=tree,security_model=none,readonly=on,multidevs=remap"),
            *_link("link0", number),
            *_link("link1", number),
            *("-netdev", forward, "-device", "virtio-net-pci,netdev=host"),
            *("-serial", f"file:{self._console}"),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def wait_until_up(self) -> None:
        """Return once its sshd is about to start."""
        give_up_at = time.monotonic() + _BOOT_S
        while not (self._console.exists() and "is up:" in self._console.read_text(errors="replace")):
            if self.process.poll() is not None or time.monotonic() > give_up_at:
                raise SystemExit(f"guest {self.number} did not start:\n{self._console.read_text(errors='replace')}")
            time.sleep(0.2)

    def command(self, line: str) -> list[str]:
        """The command that runs a line of shell there, as root in the checkout."""
        key = TREE / "root" / ".ssh" / "id_ed25519"
        options = [
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            "ConnectionAttempts=30",
        ]
        words = [word for option in options for word in ("-o", option)]
        return ["ssh", "-i", str(key), *words, "-p", str(self.port), "root@127.0.0.1", f"cd /checkout && {line}"]

    def end(self) -> None:
        """Switch it off, and wait until it is gone. One that has ended by itself, as after a panic, says why."""
        if self.process.poll() is not None:
            print(f"guest {self.number} ended:\n{self._console.read_text(errors='replace')}", flush=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def two_guests(kind: str) -> Iterator[tuple[Guest, Guest]]:
    """Both, booted. A processor that waits for another one, which the host does not run, is slower than none."""
    missing = [program for program in ("qemu-system-x86_64", "ssh") if shutil.which(program) is None]
    if missing:
        raise SystemExit("missing: apt-get install qemu-system-x86 openssh-client")
    for name in ("link0", "link1"):
        Path(f"{WORK / name}.socket").unlink(missing_ok=True)
    processors = 1 if kind == COUNTED else max(1, (os.cpu_count() or 1) // 2)
    guests = [Guest(1, kind, processors, "5G")]
    try:
        while not Path(f"{WORK}/link1.socket").exists():
            if guests[0].process.poll() is not None:
                raise SystemExit("guest 1 ended")
            time.sleep(0.05)
        guests.append(Guest(2, kind, processors, "3G"))
        for guest in guests:
            guest.wait_until_up()
        yield guests[0], guests[1]
    finally:
        for guest in guests:
            guest.end()
