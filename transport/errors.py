"""The error tree: the cause, whether a retry may help, and the status code on the wire.

    TransportError
    ├── UsageError          an argument of the caller is wrong; nothing was lost
    ├── PayloadDamagedError a field's bytes are not the text or the value that they should be
    ├── RefusedError        the other side refused, and would refuse again
    ├── LinkError           the connection failed; another port or another try may work (retryable)
    ├── GivenUpError        this side closed the connection for another reason; the port is healthy (retryable)
    ├── RingError           the ring cannot do it now, or is another ring than expected
    ├── OpenFilesError      this process may open no more files (retryable)
    ├── StoreError          the store of shared records cannot do it now, or is another store than expected
    ├── RunError            of the run as a whole: weights, membership, cooldown
    └── InternalError       a defect of this package; please report it

``retryable``: the same call may succeed when made again. ``unreadable``: no reader will ever read the payload with this
ticket, so the payload may be given up. An error that is neither is a problem of this side (a wrong secret, a deadline),
and another trainer may succeed. ``status`` is the code of the error in a STATUS record of the wire
(transport/wire/frames.py); 0: it is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, TypeVar

__all__ = [  # noqa: RUF022  # in the order of the tree; a class that is not listed is caught as one of its bases here
    "TransportError",
    "UsageError",
    "SchemaError",
    "ConfigurationError",
    "MissingDependencyError",
    "PayloadDamagedError",
    "RefusedError",
    "StaleSlotError",
    "AuthenticationError",
    "WireNotAllowedError",
    "PayloadLostError",
    "LinkError",
    "DeadlineExceededError",
    "ClosedError",
    "RingError",
    "RingFullError",
    "RingNotFoundError",
    "RingBusyError",
    "StopRequestedError",
    "StoreError",
    "StoreUnavailableError",
    "RunError",
    "DestinationError",
    "CheckpointDamagedError",
    "NoCheckpointError",
    "SnapshotError",
    "WeightsError",
    "InternalError",
]


class TransportError(Exception):
    """Base of every error raised on purpose by this package."""

    retryable: ClassVar[bool] = False
    unreadable: ClassVar[bool] = False
    status: ClassVar[int] = 0


# --- the caller's mistakes ---------------------------------------------------------------------
class UsageError(TransportError, ValueError):
    """An argument is wrong. Nothing was sent, written or lost."""


class SchemaError(UsageError):
    """A payload does not fit its schema, or two sides use different schemas."""


class PayloadTooLargeError(UsageError):
    """A payload has more bytes than a slot of this ring holds."""


class PayloadDamagedError(TransportError):
    """The bytes of a field are not the text or the value that they should be. The payload's other fields may be."""


class BufferUnsuitableError(UsageError):
    """A destination is read-only, strided, too small, of memory that cannot be written from here, or not to be had."""


class BatchTooLargeError(UsageError):
    """A batch exceeds ``pad_to``, what int32 counts, its memory limit, or memory. Its payloads were given back."""


class TicketError(UsageError):
    """Bytes or text that are not a ticket, or a ticket of a version that is not known here."""


class RankError(UsageError):
    """A rank outside 0..readers-1 of the ticket."""

    unreadable = True
    status = 6


class BusyPortError(UsageError):
    """The port to listen on is in use, by another ring or program."""


class MissingDependencyError(TransportError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""


class ConfigurationError(UsageError):
    """A setting is unknown, out of range, or contradicts another."""


class ForkedError(UsageError):
    """This process was forked from one that had UCX open, and can open no connection."""


# --- the other side refused --------------------------------------------------------------------
class RefusedError(TransportError):
    """The other side understood the request and refused it."""


class StaleSlotError(RefusedError):
    """The ticket's payload is no longer available to this rank: consumed, overwritten, discarded or expired."""

    unreadable = True
    status = 1


class WrongKeyError(RefusedError):
    """The ticket's key is not the key of this slot and generation."""

    unreadable = True
    status = 2


class WrongRingError(RefusedError):
    """The listener serves another ring than the one the ticket names. Another port may serve it."""

    retryable = True
    status = 3


class VersionMismatchError(RefusedError):
    """The two sides share no protocol version."""

    status = 4


class AuthenticationError(RefusedError):
    """The shared secret is missing or differs."""

    status = 5


class LengthMismatchError(RefusedError):
    """Slot and ticket have different sizes: the ticket was altered."""

    unreadable = True
    status = 7


class BusyError(RefusedError):
    """The listener has reached a limit, is shutting down, or its ring is still being set up."""

    retryable = True
    status = 8


class ProtocolError(RefusedError):
    """The other side violated the protocol."""

    status = 9


class RingEndedError(RefusedError):
    """The ring's writer has said that it writes nothing more, and every payload is done."""

    status = 11


class WireNotAllowedError(RefusedError):
    """No wire that the caller allows reaches the payload."""


class PayloadLostError(RefusedError):
    """No server serves this ticket's ring; the payload is lost."""

    unreadable = True


# --- the connection failed ----------------------------------------------------------------------------
class LinkError(TransportError):
    """The connection could not be made or was lost; the payload is still in its slot."""

    retryable = True


class UnreachableError(LinkError):
    """No listener answers at the address and port, or there is no route."""


class ConnectionLostError(LinkError):
    """The peer closed, reset or died during a request."""


class ReadTimeoutError(LinkError, TimeoutError):
    """The peer did not answer within the time limit; it may be suspended, slow or disconnected."""


class ChecksumError(LinkError):
    """Checksum mismatch: the received bytes differ from the written ones."""


class GivenUpError(TransportError):
    """This side closed a connection since another one had failed, or its listener asked for it. The port is healthy."""

    retryable = True


class RetriesExhaustedError(LinkError):
    """Every attempt failed; ``__cause__`` is the last failure, ``attempts`` how many there were."""

    def __init__(self, message: str, attempts: int = 0) -> None:
        super().__init__(message)
        self.attempts = attempts


class DeadlineExceededError(LinkError, TimeoutError):
    """The deadline of the whole operation passed; trying again needs a new deadline."""

    retryable = False


class ClosedError(TransportError):
    """The object was closed by this side before or during the call."""


class OpenFilesError(TransportError):
    """This process has as many open files as it may (ulimit -n), but for a reserve. Nothing was opened."""

    retryable = True


# --- the ring ----------------------------------------------------------------------------------
class RingError(TransportError):
    """The ring refused, or is not available."""


class RingFullError(RingError):
    """No slot became free in time: the readers are slower than the writer, or have ended.

    ``written`` has the tickets of those payloads of a `write_many` that were published before.
    """

    retryable = True
    written: Sequence[object] = ()


class StopRequestedError(RingFullError):
    """The ring is full, and a signal has asked the program to stop: a write does not wait for room then.

    It ends a ``with Rollout(…)`` as its normal end does, with the drain, and the ``with until_stopped()`` around it.
    """


class NoOwnerError(RingError):
    """All 16 owner numbers of the ring belong to live processes."""

    retryable = True


class RingNotFoundError(RingError):
    """No segment of this name on this host."""


class RingBusyError(RingError):
    """The segment's keeper is alive: it is neither taken over nor removed."""


class LayoutError(RingError):
    """The segment is not a ring, or of another layout version, size or schema."""


class SharedMemoryError(RingError):
    """The system has not enough shared memory, or denies it."""


# --- the store of shared records ----------------------------------------------------------------
class StoreError(TransportError):
    """The store failed; the message contains the error of its file or server."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached or is busy; whether a write took place is unknown. Read before writing again."""

    retryable = True


class StoreFullError(StoreError):
    """The store has no room. Nothing of the call was stored."""

    retryable = True


class StoreUnsuitableError(StoreError, UsageError):
    """This file or server cannot hold this store: a network file system, another program's file, an unknown version."""


# --- the run ----------------------------------------------------------------------------
class RunError(TransportError):
    """A failure of the whole run; weights, membership and cooldown have classes of their own."""


class JoinTimeoutError(RunError, TimeoutError):
    """The round timed out: too few members joined, and the run was not closed."""


class StaleRoundError(RunError):
    """A member of an older round asked for what only members of the present one may decide. Join again."""


class RunLostError(RunError):
    """The run's end is unknown: its store is unavailable, or has lost the run."""


class DestinationError(RunError):
    """The destination of checkpoints failed, is full or is gone. What was not recorded there does not count."""

    retryable = True


class DestinationDeniedError(DestinationError):
    """The destination refuses what a checkpoint needs: list, create, read or delete; the message names which."""

    retryable = False


class UploadCancelledError(RunError):
    """An upload was called off before its manifest was written, so there is none."""


class CheckpointDamagedError(RunError):
    """The files at the destination differ from their manifest, or from the record of their epoch."""


class NoCheckpointError(RunError):
    """No epoch of this run was recorded as checkpointed, or not the one that was asked for; or no snapshot is there."""


class SnapshotError(RunError):
    """A snapshot was not taken as a whole, or not restored; the message says what is missing or in the way."""


class CoordinatorLostError(RunError):
    """The coordinator gave no sign for longer than the time limit; a new one may carry the cooldown on."""


class WeightsError(RunError):
    """An update of the weights failed; which version each replica serves is in its `outcome`, where there is one."""

    outcome: object = None


class WeightsTimeoutError(WeightsError, TimeoutError):
    """A step of an update, or the whole of it, took longer than its limit."""


class WeightsChecksumError(WeightsError):
    """The bytes that arrived as a version have another checksum. They are not loaded."""


class MemberLostError(WeightsError):
    """A trainer or replica ended, or its connection broke, in the middle of an update."""


class ParentLostError(MemberLostError):
    """The member that this one pulls from ended or gave up. A consequence: that member's own error is the cause."""


class ChildrenLostError(MemberLostError):
    """No member pulls from this one any more. A consequence: the errors of those members are the cause."""


class MemberFailedError(WeightsError):
    """A trainer or replica answered with an error; the message has its kind and its text."""


# --- our own defects ---------------------------------------------------------------------------
class InternalError(TransportError):
    """A defect of this package. Please report it with the message."""


OWN_FAULTS: Final = (
    AuthenticationError,
    ForkedError,
    MissingDependencyError,
    VersionMismatchError,
    WireNotAllowedError,
)
"""With these nothing can be read until this process is configured, or started, otherwise."""

E = TypeVar("E", bound=TransportError)


def bare(error: E) -> E:
    """Return the error as a value, without the frames of its traceback and of its causes'.

    These keep what was read beside it alive, and are of no use to who meets the error elsewhere.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error
