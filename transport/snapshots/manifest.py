"""Parts of a snapshot at its destination: places, the manifest, the index of each ring. Pure."""

from __future__ import annotations

import operator
import re
import secrets
from typing import Final

import msgspec

from transport.cooldown.epochs.manifest import FILES, File
from transport.cooldown.epochs.records import check_name, is_attempt
from transport.decoders import json_decoder, msgpack_decoder
from transport.errors import CheckpointDamagedError, TicketError, UsageError
from transport.ring.buffer import MAX_READERS
from transport.runtime.hiding import hiding
from transport.store.stored import encode
from transport.ticket import Ticket

FORMAT: Final = 2
NAME: Final = "manifest.json"
MOST_BYTES: Final = 64 << 20  # of a manifest
MOST_STEP: Final = 10**12 - 1  # twelve digits, so that names sort like numbers

_BEGUN: Final = ".begun"
_STEP: Final = re.compile(r"step-(\d{12})")


class RingPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of one ring. Without payloads it has no files.

    Attributes:
        ring, segment: id and name; host: `host_identity()` of where it was.
        fingerprint: of the ring's schema, 32 hexadecimal digits; zeros: payloads describe themselves.
        consumers: names and numbers of its ranks, as the ring has them; "": without names.
        payloads, bytes: how many, and of all of them together.
        data, index: the files.
    """

    ring: str
    segment: str
    host: str
    fingerprint: str
    consumers: str
    slots: int
    slot_bytes: int
    payloads: int
    bytes: int
    data: File | None = None
    index: File | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One snapshot, or the part of it that one host has."""

    run: str
    step: int
    attempt: str  # 16 hexadecimal digits
    created: float  # seconds since 1970 by the clock of the cut's host, for display; no order depends on it
    number: int = 0  # of the cut, by the counter at the destination: later cuts have greater ones
    rings: tuple[RingPart, ...]
    elsewhere: tuple[str, ...] = ()  # ids of rings that this host knew and could not see; other parts have them
    format: int = FORMAT

    @property
    def payloads(self) -> int:
        """Number of payloads of all rings."""
        return sum(ring.payloads for ring in self.rings)

    @property
    def total(self) -> int:
        """Bytes of all payloads."""
        return sum(ring.bytes for ring in self.rings)

    @property
    def place(self) -> str:
        """Folder of the snapshot at the destination."""
        return place_of(self.run, self.step, self.attempt)

    def path(self, file: File) -> str:
        """Return the path of one of its files at the destination."""
        return f"{self.place}/{FILES}/{file.name}"

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        return encode(self)


@hiding("ticket")
class ManifestEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One payload of a ring; its bytes stand behind those of the entry before."""

    ticket: bytes
    due: tuple[int, ...]  # ranks that have not consumed it
    policy_version: int | None


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The payloads of a ring in the order of their publication, and its encoded schema (b"": none)."""

    schema: bytes
    entries: tuple[ManifestEntry, ...]


class _Head(msgspec.Struct, frozen=True):
    format: int
    number: int = 0


_decode_index = msgpack_decoder(Index)


# --- places ---------------------------------------------------------------------------------------------
def folder_of(run: str) -> str:
    """Return the folder of all snapshots of a run."""
    return f"{check_name(run, 'run')}/snapshots"


def step_folder(run: str, step: int) -> str:
    """Return the folder of the snapshots of one step; each attempt has one of its own."""
    return f"{folder_of(run)}/step-{check_step(step):012d}"


def place_of(run: str, step: int, attempt: str) -> str:
    """Return the folder of one snapshot."""
    return f"{step_folder(run, step)}/{check_attempt(attempt)}"


def part_name(part: int) -> str:
    """Return the name of the file that says that one host's part is complete."""
    return f"part-{part}.json"


def begun_name(part: int) -> str:
    """Return the name of the file that says when one host's part was begun, by the counter at the destination."""
    return f"part-{part}{_BEGUN}"


def is_begun_name(name: str) -> bool:
    """Return whether this is a name of `begun_name`."""
    return name.endswith(_BEGUN)


def counter_path(run: str) -> str:
    """Return the path of the counter of a run's cuts."""
    return f"{folder_of(run)}/last-cut"


def step_of(name: str) -> int | None:
    """Return the step whose folder has this name; None: it is no such folder."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def new_attempt() -> str:
    """Return a name for one cut, which no other has."""
    return secrets.token_hex(8)


def check_step(step: int) -> int:
    """Return the step, or raise UsageError."""
    number = operator.index(step)
    if not 0 <= number <= MOST_STEP:
        raise UsageError(f"step={number}: give 0 to {MOST_STEP}")
    return number


def check_attempt(attempt: str) -> str:
    """Return the name of an attempt, or raise UsageError."""
    if not isinstance(attempt, str) or not is_attempt(attempt):
        raise UsageError(f"attempt={attempt!r:.40}: give the 16 digits that `Snapshot.attempt` had")
    return attempt


# --- reading what may be damaged ------------------------------------------------------------------------
def decode(data: bytes, run: str, step: int, attempt: str) -> Manifest:
    """Return the manifest that lies in the place of this snapshot.

    Raises CheckpointDamagedError if it is none, or belongs to another snapshot; UsageError for a newer format.
    """
    try:
        found = json_decoder(_Head)(data).format
        if found > FORMAT:
            raise UsageError(
                f"the snapshot of step {step} has format {found}, this build reads up to {FORMAT}: upgrade "
                "payload-transport"
            )
        manifest = json_decoder(Manifest)(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamagedError(f"the snapshot's manifest cannot be decoded: {error}") from error
    if (manifest.run, manifest.step, manifest.attempt) != (run, step, attempt):
        raise CheckpointDamagedError(
            f"the manifest belongs to another snapshot: run {manifest.run}, step {manifest.step}, attempt "
            f"{manifest.attempt}"
        )
    files = [file for ring in manifest.rings for file in (ring.data, ring.index) if file is not None]
    names = [file.name for file in files]
    whole = all((ring.data is None) == (ring.index is None) == (not ring.payloads) for ring in manifest.rings)
    if not whole or len(set(names)) != len(names) or not all(file.plausible for file in files):
        raise CheckpointDamagedError(
            "the snapshot's manifest lists a file twice, outside its folder, without its checksums, or none of payloads"
        )
    return manifest


def number_of(data: bytes) -> int:
    """Return the number of a manifest's cut; 0, before all others, for one that cannot be read or has none."""
    try:
        return json_decoder(_Head)(data).number
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0


def decode_index(data: bytes, part: RingPart) -> tuple[bytes, list[tuple[Ticket, ManifestEntry]]]:
    """Return the encoded schema of a ring, and its payloads.

    CheckpointDamagedError if they are not what the manifest says.
    """
    try:
        index = _decode_index(data)
        found = [(Ticket.decode(entry.ticket), entry) for entry in index.entries]
    except (msgspec.MsgspecError, TicketError, RecursionError) as error:
        raise CheckpointDamagedError(f"the index of ring {part.ring[:8]} cannot be decoded: {error}") from error
    fits = all(ticket.ring == part.ring and set(entry.due) <= set(range(MAX_READERS)) for ticket, entry in found)
    if not fits or len(found) != part.payloads or sum(ticket.size for ticket, _ in found) != part.bytes:
        raise CheckpointDamagedError(f"the index of ring {part.ring[:8]} is not the one that the manifest describes")
    return index.schema, found
