"""What each process claims to have done, in a file that outlives it: one line per claim, appended by one write.

    I writer first last          will write these numbers, last excluded; nothing is promised of them yet
    P writer number=id …         are in the ring, and the queue has their tickets
    F writer number=id …         were found unread in the ring of a killed predecessor
    E writer                     has written its share
    N rank id=writer=number …    has claimed these tickets, of which the queue may yet make a report
    A rank number=writer=token … asks the queue to accept these claims
    Q rank number=writer=token … does not know of these claims, and of no others, whether the queue has accepted them
    C rank writer=number …       the queue has accepted them: consumed
    D rank number=writer=token … is about to end these claims without consuming them; what follows "because" is why
    K rank writer=number …       it has ended these claims so
    R rank writer=number …       it has not: they were another's by then
    X rank writer=number why     other bytes than those of the payload

A line that a kill tore ends without its full stop and counts as never said; a process begins with a line of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


class Journal:
    """Appends; belongs to one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._descriptor, b"\n")  # ends what a killed predecessor left

    def say(self, *words: object) -> None:
        """One line, in one write. It is true for whoever reads it as soon as this returns."""
        line = (" ".join(map(str, words)) + " .\n").encode()
        if os.write(self._descriptor, line) != len(line):
            raise OSError(f"no room for the journal {self.path}")

    def close(self) -> None:
        """Says no more; a process that ends needs no such call."""
        os.close(self._descriptor)


class Reader:
    """Reads what was appended since it last looked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def lines(self) -> Iterator[list[str]]:
        """The words of each complete line."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._at += end
        for line in data[:end].decode().splitlines():
            words = line.split()
            if words and words[-1] == ".":
                yield words[:-1]
