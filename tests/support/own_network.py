"""A Python program in a network namespace of its own, which has loopback alone; iproute2 is not needed for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_OWN = ("unshare", "--user", "--map-root-user", "--net")
_LOOPBACK_UP = """
import fcntl, socket, struct
with socket.socket() as _socket:
    fcntl.ioctl(_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
"""


def said_in_own_network(code: str, **environment: str) -> str:
    """Run the program there, with these variables besides; what it wrote to standard error. A failure raises."""
    if subprocess.run([*_OWN, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are refused here")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("UCX", "TRANSPORT_"))}
    words = [*_OWN, sys.executable, "-c", _LOOPBACK_UP + code]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, env={**inherited, **environment})
    assert done.returncode == 0, done.stderr
    return done.stderr
