"""Process namespaces in which everything ends at one moment, as with a job that is killed, or with its host.

A job has process numbers of its own. A host also has an empty /dev/shm, a boot id, and, where the kernel has them,
clocks of its own. Both share the disk with what was there before.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Literal

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_HOST = f'mount -t tmpfs -o size=256m tmpfs /dev/shm && mount --bind "$1" {_BOOT_ID} && shift && exec "$@"'
_SUPPORT = Path(__file__).parent


class Machine:
    """One life of it, which runs a Python program as its first process."""

    def __init__(self, kind: Literal["job", "host"], folder: Path, *program: object) -> None:
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside: list[str] = []
        if kind == "host":
            if Path("/proc/self/ns/time").exists():
                since_boot = str(random.randrange(10_000_000))
                command += ["--time", "--monotonic", since_boot, "--boottime", since_boot]
            identity = folder / "boot_id"
            identity.write_text(f"{uuid.uuid4()}\n")
            inside = ["sh", "-c", _HOST, "sh", str(identity)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        path = os.pathsep.join([str(_SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [*command, *inside, sys.executable, *map(str, program)], env=inherited | {"PYTHONPATH": path}
        )

    @property
    def running(self) -> bool:
        """Whether its first process is."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to everything in it; returns when all is over."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for pid in children.read_text().split() if self.running else []:
            os.kill(int(pid), signal.SIGKILL)  # the kernel kills the others, and waits for them
        self._process.wait()

    def wait(self, timeout_s: float) -> int:
        """The exit status of its first process."""
        return self._process.wait(timeout_s)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def why_not() -> str:
    """Why there can be none here; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if shutil.which("unshare") is None:
        return "unshare is missing (apt-get install util-linux)"
    tried = subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"], capture_output=True, text=True
    )
    return tried.stderr.strip() if tried.returncode else ""
