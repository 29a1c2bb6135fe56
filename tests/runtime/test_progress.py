"""The bar: drawn on a terminal, silent elsewhere."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys

import pytest

from transport.runtime.progress import Lines

FETCHING = """
import numpy as np
from transport import SharedRingBuffer, UCXXDataPackerMixin

packer = UCXXDataPackerMixin()
packer.setup_ucxx_packer(progress="bar", wire={"mapped"})
with SharedRingBuffer.create(slots=8, slot_bytes=1000) as ring:
    tickets = [ring.write_raw(np.full(1000, seed, np.uint8)) for seed in range(4)]
    packer.start_prefetch(tickets)
    batch = packer.collect_prefetch(30)
    print(len(packer.consume(batch)))
    packer.cleanup_ucxx_packer()
"""


def drawn(descriptor: int) -> str:
    """All that was written to a terminal whose other side is closed."""
    text = b""
    with contextlib.suppress(OSError):  # how a pseudo-terminal ends
        while data := os.read(descriptor, 4096):
            text += data
    return text.decode()


def test_a_terminal_sees_the_batch_progress() -> None:
    terminal, side = pty.openpty()
    try:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        child = subprocess.Popen(
            [sys.executable, "-c", FETCHING], stdout=subprocess.PIPE, stderr=side, text=True, env=environment
        )
        os.close(side)
        output = drawn(terminal)
        assert child.stdout is not None
        assert child.stdout.read() == "4\n"
        child.stdout.close()
        assert child.wait() == 0
    finally:
        os.close(terminal)
    assert "4/4" in output


@pytest.mark.nightly
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_is_no_terminal_sees_no_bar(stream: str) -> None:
    done = subprocess.run([sys.executable, "-c", FETCHING], capture_output=True, text=True)
    assert done.returncode == 0
    assert getattr(done, stream) == ("4\n" if stream == "stdout" else "")


def test_without_a_terminal_a_line_after_five_seconds_and_then_every_thirty(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    show = Lines("measuring", clock=lambda: now[0])
    for second in range(1, 71):
        now[0] = float(second)
        show(second, 100, 0)
    lines = capsys.readouterr().err.splitlines()
    assert [re.findall(r"\d+", line) for line in lines] == [["5", "100", "2"], ["35", "100", "65"], ["65", "100", "35"]]
    show = Lines("measuring", clock=lambda: now[0])
    now[0] += 4.9  # what is done by then needs no line
    show(3, 4, 0)
    show(4, 4, 0)
    assert capsys.readouterr().err == ""
