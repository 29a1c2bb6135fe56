"""A checkpoint that all members save together: what each saved, who uploads which files, their one manifest. Pure.

A collective save makes files on every member. The members of a host share its disk, and a third of them, elected,
upload its files: each uploads a *share*. Every party computes the same shares from the same records. All shares of all
hosts together are a set, and nothing less is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from transport.cooldown.epochs.election import checkpointers, permuted
from transport.cooldown.epochs.manifest import CheckpointManifest, File, folder_and_file
from transport.cooldown.epochs.records import SET, EpochRecord

NO_SAVE: Final = ""  # the launch of an epoch in which no member saves


class SavedShare(msgspec.Struct, frozen=True, kw_only=True):
    """Record of what one member has saved. Written once: a member saves once in an epoch."""

    member: str
    host: str
    folder: str  # on that host
    files: tuple[tuple[str, int], ...]  # names below the folder, and bytes


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One uploaded share of a host's files, not yet verified."""

    host: str
    number: int  # among the host's shares
    client: str  # who uploaded it
    attempt: str
    files: tuple[File, ...]

    @property
    def upload(self) -> str:
        """The upload that has its files."""
        return f"{self.client}/{self.attempt}"


class Local(NamedTuple):
    """A file that is to be uploaded."""

    name: str
    size: int
    folders: tuple[str, ...]  # of the members that saved it; more than one must have saved the same


def shares_of(record: EpochRecord, host: str) -> int:
    """Return how many shares a host's files are uploaded in."""
    return checkpointers(len(record.members_of(host)))


def divided(saved: Sequence[SavedShare], shares: int) -> list[list[Local]]:
    """Return the files of a host's members in shares of about the same size.

    The largest come first, each to the smallest share.
    """
    sizes: dict[str, int] = {}
    folders: dict[str, list[str]] = {}
    for each in sorted(saved, key=lambda each: each.member):
        for name, size in each.files:
            sizes.setdefault(name, size)
            folders.setdefault(name, []).append(each.folder)
    parts: list[list[Local]] = [[] for _ in range(shares)]
    filled = [0] * shares
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = filled.index(min(filled))
        parts[least].append(Local(name, sizes[name], tuple(folders[name])))
        filled[least] += sizes[name]
    return parts


def turns(record: EpochRecord, host: str, number: int) -> tuple[str, ...]:
    """Return the uploaders of a share in turn.

    First the elected member that it belongs to, then, each after a silence, the others.
    """
    elected = record.elected_of(host)
    others = [name for name in record.members_of(host) if name not in elected]
    # In an order that depends on seed and epoch, so that it is not always the same ones that stand in.
    others = [*permuted(others, seed=record.seed, epoch=record.epoch, algorithm=record.algorithm)]
    others += [name for name in elected if name != elected[number]]
    turn = number % len(others) if others else 0
    return (elected[number], *others[turn:], *others[:turn])


class NameConflict(Exception):
    """Members saved different files under one name."""


def complete(record: EpochRecord, shares: Iterable[Share]) -> list[Share] | None:
    """Return the shares of a complete set, one for each share of each host; None while one is missing.

    A share whose upload was refused counts as missing. Of two uploads of a share the first by name is taken, so that
    all coordinators take the same.
    """
    found: dict[tuple[str, int], Share] = {}
    for share in sorted(shares, key=lambda share: share.upload, reverse=True):
        if share.upload not in record.refused:
            found[share.host, share.number] = share
    wanted = {(host, number) for host in set(record.hosts.values()) for number in range(shares_of(record, host))}
    if not wanted or not wanted <= set(found):
        return None
    return [found[place] for place in sorted(wanted)]


def set_name(shares: Iterable[Share]) -> str:
    """Return the attempt of a set.

    Other shares have another name, so a manifest is never overwritten by a different one.
    """
    return hashlib.sha256(" ".join(share.upload for share in shares).encode()).hexdigest()[:16]


def composed(record: EpochRecord, shares: Sequence[Share], saved: Mapping[str, SavedShare]) -> CheckpointManifest:
    """Return the one manifest of a complete set; the same for the same shares, in whichever process it is made.

    Raises NameConflict: two different files have one name, or the shares have not exactly the files that were saved.
    """
    files: dict[str, File] = {}
    for share in shares:
        for file in share.files:
            file = msgspec.structs.replace(file, upload=share.upload)
            known = files.setdefault(file.name, file)
            if (known.size, known.blocks) != (file.size, file.blocks):
                raise NameConflict(
                    f"two members saved different files named {file.name}: {known.size} and {file.size} bytes, in "
                    f"{known.upload} and {file.upload}; give each its own name"
                )
    if both := folder_and_file(files):
        raise NameConflict(f"{both} is a file of one member, and a folder of another; give each its own names")
    missing = [name for name in record.hosts if name not in saved]
    names = {name for each in saved.values() for name, _ in each.files}
    if missing or set(files) != names:
        differ = sorted(set(files) ^ names)[:3]
        raise NameConflict(f"the shares are not what the members saved: members missing {missing}, files {differ}")
    return CheckpointManifest(
        run=record.run,
        epoch=record.epoch,
        step=record.step,
        client=SET,
        attempt=set_name(shares),
        files=tuple(files[name] for name in sorted(files)),
    )
