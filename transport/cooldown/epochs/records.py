"""The records that coordinator and clients store for an epoch: types, JSON, and names. Pure.

Enums are stored by name. Records are JSON without secrets: a destination's URL cannot contain any.
"""

from __future__ import annotations

import enum
import re
from typing import Final

import msgspec

from transport.cooldown.epochs.election import ALGORITHM, elect
from transport.errors import UsageError

LAYOUT: Final = 1
SET: Final = "sharded"  # stands for all members together, where a client is named
MOST_EPOCH: Final = 10**12 - 1  # twelve digits, so that names sort like numbers

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_ATTEMPT: Final = re.compile(r"[0-9a-f]{16}")


class Phase(enum.Enum):
    """State of an epoch."""

    TRAINING = "training"
    COOLDOWN = "cooldown"
    ENDED = "ended"


class Outcome(enum.Enum):
    """Outcome of an epoch's cooldown; once recorded it never changes."""

    CHECKPOINTED = "checkpointed"
    TIMED_OUT = "timed_out"


class ReportKind(enum.Enum):
    """Result of a client's upload."""

    UPLOADED = "uploaded"
    SKIPPED = "skipped"  # for tests: nothing was uploaded, and nothing is completed
    CANCELLED = "cancelled"
    FAILED = "failed"


class Refusal(enum.Enum):
    """Reason for which a report does not end the cooldown."""

    NOT_ELECTED = "not_elected"
    OTHER_EPOCH = "other_epoch"
    MANIFEST_MISSING = "manifest_missing"
    MANIFEST_ALTERED = "manifest_altered"  # checksum mismatch with the report, or not decodable
    FILE_MISSING = "file_missing"
    WRONG_SIZE = "wrong_size"
    WRONG_CHECKSUM = "wrong_checksum"
    NAME_CONFLICT = "name_conflict"  # two members saved different files under one name
    UNREADABLE = "unreadable"  # the destination failed; verification is repeated
    WITHDRAWN = "withdrawn"  # by its client, which was cancelled and removes it


class UploadReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client's report on its upload. The path of the files is computed from it; reports contain no paths."""

    run: str
    epoch: int
    client: str
    kind: ReportKind
    attempt: str = ""  # of the upload; 16 hexadecimal digits
    manifest_sha256: str = ""
    detail: str = ""

    @property
    def upload(self) -> str:
        """The reported upload."""
        return f"{self.client}/{self.attempt}"


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last state of one client's upload, kept for operators."""

    kind: ReportKind
    attempt: str = ""
    refusal: Refusal | None = None
    detail: str = ""

    @property
    def refused(self) -> bool:
        """True if the upload is refused for good."""
        return self.refusal not in (None, Refusal.UNREADABLE)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The upload that was verified."""

    client: str
    attempt: str
    manifest_sha256: str
    files: int
    bytes: int

    @property
    def upload(self) -> str:
        """Upload of the checkpoint."""
        return f"{self.client}/{self.attempt}"


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch. Written by its coordinator, by a client that withdraws its upload, or ended by a later coordinator.

    ``phase`` "ended" is final.
    """

    run: str
    epoch: int
    destination: str
    cooldown_s: float
    seed: int
    phase: Phase = Phase.TRAINING
    outcome: Outcome | None = None
    checkpoint: Checkpoint | None = None
    step: int = 0  # of the model that is to be uploaded
    clients: tuple[str, ...] = ()  # those healthy when the cooldown began
    hosts: dict[str, str] = {}  # host of each client whose save is collective; empty: each saves the whole model
    verify_s: float = 0.0  # added to cooldown_s for verification; 0: as long as cooldown_s
    refused: dict[str, str] = {}  # uploads of parts, with what was wrong
    elapsed_s: float = 0.0  # of the cooldown, while a coordinator was running
    notes: dict[str, Note] = {}  # by client
    opened_at: float = 0.0  # Unix time, for display; no decision depends on it
    ended_at: float = 0.0
    algorithm: int = ALGORITHM
    layout: int = LAYOUT

    def __post_init__(self) -> None:
        if self.layout != LAYOUT:
            raise ValueError(f"epoch record layout mismatch: found {self.layout}, this build reads {LAYOUT}")

    @property
    def elected(self) -> tuple[str, ...]:
        """Names of the clients that upload. Raises UsageError for an unknown algorithm."""
        if not self.hosts:
            return elect(self.clients, seed=self.seed, epoch=self.epoch, algorithm=self.algorithm)
        return tuple(name for host in sorted(set(self.hosts.values())) for name in self.elected_of(host))

    def elected_of(self, host: str) -> tuple[str, ...]:
        """Return the members of one host that upload its files: the election among these members alone."""
        return elect(self.members_of(host), seed=self.seed, epoch=self.epoch, algorithm=self.algorithm)

    def members_of(self, host: str) -> tuple[str, ...]:
        """Return the members on one host, in order of their names."""
        return tuple(sorted(name for name, its in self.hosts.items() if its == host))

    @property
    def most_s(self) -> float:
        """Seconds after which a cooldown ends even if something is still being verified."""
        return self.cooldown_s + (self.verify_s or self.cooldown_s)

    def folder(self, upload: str) -> str:
        """See `upload_folder`."""
        return upload_folder(self.run, self.epoch, upload)

    def accepts(self, client: str, kind: ReportKind) -> bool:
        """Return whether this client's report of this kind counts. Uploads of members count as one set only."""
        if not self.hosts:
            return client in self.elected
        return client == SET if kind is ReportKind.UPLOADED else client in self.hosts


# --- names --------------------------------------------------------------------------------------------
def check_name(name: str, what: str) -> str:
    """Return the name of a run or a client, or raise UsageError: it becomes part of keys and paths."""
    if not is_name(name):
        raise UsageError(f"{what} {name!r}: give 1 to 100 of A-Z a-z 0-9 . _ -, the first not a dot or dash")
    return name


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a run or a client."""
    return bool(_NAME.fullmatch(text))


def check_epoch(epoch: int) -> int:
    """Return the epoch, or raise UsageError."""
    if not 0 <= epoch <= MOST_EPOCH:
        raise UsageError(f"epoch {epoch}: give 0 to {MOST_EPOCH}")
    return epoch


def is_attempt(text: str) -> bool:
    """Return whether a text can be the name of one client's attempt."""
    return bool(_ATTEMPT.fullmatch(text))


def is_upload(text: str) -> bool:
    """Return whether a text can be the name of an upload, "CLIENT/ATTEMPT"."""
    client, _, attempt = text.partition("/")
    return is_name(client) and is_attempt(attempt)


def epoch_folder(run: str, epoch: int) -> str:
    """Return the folder of an epoch's uploads at the destination."""
    return f"{run}/epoch-{epoch:012d}"


def upload_folder(run: str, epoch: int, upload: str) -> str:
    """Return the folder of one upload at the destination; each upload has its own."""
    return f"{epoch_folder(run, epoch)}/{upload}"


def outcomes_folder(run: str) -> str:
    """Return the folder of the outcomes' copies at the destination."""
    return f"{run}/outcomes"
