"""What a disk may hold after a power loss, at every moment of a process whose writes and flushes recorded.c recorded.

What was flushed (fsync, fdatasync) is there. Of what a file was given since, a disk may have nothing, everything, a
part in any order, and a sector of 512 bytes without the rest of its write. A file has its name, or has lost it, once
its folder was flushed. This is the contract of the system calls. Not shown: a disk that says it has flushed and has
not, the journal of the file system, and writes that are torn inside a sector.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ENTRY = struct.Struct("<IIQQ")
_SECTOR = 512
SAID = "said"  # the file to which a process writes what it has told its user


class Entry(NamedTuple):
    """One system call that has returned: w(rite), t(runcate), s(ync) or u(nlink)."""

    kind: str
    name: str
    offset: int
    data: bytes


class _File:
    def __init__(self) -> None:
        self.flushed = bytearray()
        self.since: list[Entry] = []
        self.named = False


class Disk(NamedTuple):
    """What a power loss leaves: files by name; and what the process had told its user before."""

    files: dict[str, bytes]
    said: list[str]


def entries(record: bytes) -> list[Entry]:
    """The recorded calls, in their order."""
    found, at = [], 0
    while at < len(record):
        kind, name_bytes, offset, size = _ENTRY.unpack_from(record, at)
        at += _ENTRY.size
        name, data = record[at : at + name_bytes].decode(), record[at + name_bytes : at + name_bytes + size]
        found.append(Entry(chr(kind), name, offset, data))
        at += name_bytes + size
    return found


def disks(record: bytes, seed: int = 0) -> Iterator[Disk]:
    """After each call, what may be there if the power fails then: the least, the most, and a part by chance."""
    chance = random.Random(seed)
    files: dict[str, _File] = {}
    ghosts: dict[str, _File] = {}  # removed, and their folder was not flushed since
    said: list[str] = []
    for entry in entries(record):
        if entry.name == SAID:
            said.append(entry.data.decode().strip())
            continue
        if entry.kind == "u":
            removed = files.pop(entry.name)
            if removed.named:
                ghosts[entry.name] = removed
        elif entry.name == ".":
            ghosts.clear()
            for file in files.values():
                file.named = True
        else:
            file = files.setdefault(entry.name, _File())
            if entry.kind == "s":
                file.flushed, file.since = _applied(file.flushed, file.since), []
            else:
                file.since.append(entry)
        old = {name: bytes(file.flushed) for name, file in ghosts.items()}
        named = {name: bytes(file.flushed) for name, file in files.items() if file.named}
        yield Disk(old | named, list(said))
        if entry.kind != "s":
            yield Disk({name: bytes(_applied(file.flushed, file.since)) for name, file in files.items()}, list(said))
            part = {name: bytes(_applied(file.flushed, _part(file.since, chance))) for name, file in files.items()}
            for name in list(part):
                if not files[name].named and chance.random() < 0.5:
                    del part[name]
            yield Disk((old if chance.random() < 0.5 else {}) | part, list(said))


def _applied(data: bytearray, calls: list[Entry]) -> bytearray:
    data = bytearray(data)
    for call in calls:
        end = call.offset + len(call.data)
        if call.kind == "t":
            del data[call.offset :]
        data.extend(bytes(max(end - len(data), 0)))
        if call.kind == "w":
            data[call.offset : end] = call.data
    return data


def _part(calls: list[Entry], chance: random.Random) -> list[Entry]:
    """Some sectors of some of the calls."""
    kept = []
    for call in calls:
        if call.kind == "t":
            kept += [call] * (chance.random() < 0.5)
            continue
        for begin in range(0, len(call.data), _SECTOR):
            if chance.random() < 0.5:
                kept.append(call._replace(offset=call.offset + begin, data=call.data[begin : begin + _SECTOR]))
    return kept


def put(disk: Disk, folder: Path) -> None:
    """Make the folder what is on the disk."""
    folder.mkdir()
    for name, data in disk.files.items():
        (folder / name).write_bytes(data)
