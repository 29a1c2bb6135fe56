"""Puts a process and all that it starts into namespaces of their own: when it ends, however, the kernel ends the rest.

    parent, outside   waits, passes SIGINT, SIGTERM and SIGHUP on, and returns the child's status
    child, inside     is init of a PID namespace; its network has nothing but loopback, its /dev/shm is empty

Namespaces, links, mounts and processes have no name outside, and nothing keeps them but the child. SIGKILL to the
parent kills the child (PR_SET_PDEATHSIG), and with the child its PID namespace.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_ALL = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
_PR_SET_PDEATHSIG = 1
SKIPPED = 77  # exit status of a run that cannot be made here
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """This user may not make namespaces, or a program that makes them is missing."""


def enter() -> None:
    """Return in the child only. The parent exits with the child's status.

    Raises:
        Refused: nothing has changed.
    """
    for tool, package in (("ip", "iproute2"), ("mount", "util-linux")):
        if shutil.which(tool) is None:
            raise Refused(f"{tool} is missing (apt-get install {package})")
    user, group = os.getuid(), os.getgid()
    flags = _ALL if user == 0 else _ALL | _CLONE_NEWUSER
    if _libc.unshare(flags) != 0:
        raise Refused(f"namespaces are refused: {os.strerror(ctypes.get_errno())}; run as root")
    if user != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    lives, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        _inside(lives)
        return
    os.close(lives)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(128 - status if status < 0 else status)


def _inside(lives: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([lives], [], [], 0)[0]:  # the parent was killed before that
        os._exit(1)
    os.setsid()  # signals of the terminal come through the parent
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))
    for command in (
        ("mount", "--make-rprivate", "/"),
        ("mount", "-t", "proc", "proc", "/proc"),
        ("mount", "-t", "tmpfs", "tmpfs", "/dev/shm"),
        ("ip", "link", "set", "lo", "up"),
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{' '.join(command)}: {done.stderr.strip()}", file=sys.stderr)
            os._exit(SKIPPED)
