"""The native core: ring operations, large copies, checksum, pooled memory, and a futex on shared memory.

Every call is thread-safe. Calls that may take long (take with a timeout, copies and checksums of
64 KiB and more, wait) release the GIL. Python signals interrupt waits (KeyboardInterrupt arrives).

Raised are errors of `transport.errors`: ClosedError after `close` or in a child after fork, UsageError for an argument
out of range, and RingError with its kinds for what the segment or the system refuses.
"""

from collections.abc import Sequence
from typing import Any, Literal, final, overload

from typing_extensions import Buffer

LAYOUT_VERSION: int
WIRE_VERSION: int
MAX_READERS: int  # 16, ranks per payload
MAX_OWNERS: int  # 16, processes attached as owners
MAX_PORTS: int  # 16, entries of the port table
NO_VERSION: int  # as a policy version in columns: published without one; as the oldest one: any will do
MAX_WAITED: int  # rings that `Ring.wait_any` takes
MAX_ATTEMPTS: int  # the largest ``most_attempts``
NOTE_CAPACITY: int  # bytes a slot keeps beside its payload (the encoded ticket)
MAX_SCHEMA: int

# slot states, as in the word
FREE: int
WRITING: int
READY: int
READING: int

# roles of an owner (information for `top`; only ROLE_OBSERVER takes no owner place)
ROLE_OBSERVER: int
ROLE_WRITER: int
ROLE_LISTENER: int
ROLE_READER: int

PIN_OK: int  # of `Ring.pin`; every other answer refuses

# why `begin_read` refuses; other numbers: the payload is not in its slot any more
READ_DONE: int  # this rank has consumed it, or it was discarded
READ_WRONG_KEY: int  # not that of slot and generation
READ_EXPIRED: int  # its deadline has passed; it was discarded
READ_OTHER_LENGTH: int

@final
class Bell:
    """Wakes threads of this process that wait for rings."""

    def __init__(self) -> None: ...
    @property
    def rung(self) -> int: ...
    def ring(self) -> None: ...

@final
class Deadline:
    """A point of the monotonic clock. Every timeout of this package becomes one: below zero and NaN are over at once,
    and what is longer than 30 years never is."""

    def __init__(self, timeout_s: float) -> None: ...
    @property
    def left_s(self) -> float: ...

@final
class SlotInfo:
    """One consistent look at a slot (re-read until the word was the same before and after).

    A FREE slot keeps ``done`` and what stands below it of its last payload: 0xFFFF when that was consumed by all or
    discarded. From ``readers`` on everything is 0 when the generation was not published.
    """

    state: int
    generation: int
    done: int  # bit set of ranks; unused ranks (>= readers) start as done
    pins: int  # bit set of owners
    readers: int
    length: int
    checksum: int
    sequence: int  # order of publishing in this ring, from 1
    deadline_ns: int  # 0: none; not interpreted here
    policy_version: int | None  # None: its writer gave none, or nothing was published

@final
class OwnerInfo:
    index: int
    alive: bool  # its kernel lock is held
    role: int
    pid: int
    started_ns: int  # CLOCK_REALTIME
    heartbeat_ns: int  # CLOCK_MONOTONIC of its last heartbeat() call
    heard_ns: int  # CLOCK_MONOTONIC of its last sign of life, kept where its claims have a lease
    lease_ns: int  # its claims end after so long without one; 0: with its process
    port: int  # 0 unless a listener

@final
class Ring:
    """One attachment of this process to a ring's segment.

    `create` makes the segment, keeps the keeper lock, and takes an owner place as ROLE_WRITER.
    If a segment of this name exists, its keeper is dead, and layout, sizes and fingerprint agree,
    it is taken over: ring id, generations, READY slots and ports stay; `taken_over` is True.
    If its keeper is dead and the layout differs: LayoutError (the caller picks another name).

    An observer looks, consumes, discards and reclaims; what writes or pins needs an owner place (UsageError).
    """

    name: str  # of its entry in /dev/shm, "/transport-…"
    file: str  # that it lies in; "": it lies in /dev/shm
    ring_id: bytes  # 16 random bytes
    secret: bytes  # 16 random bytes, the key of the slot keys
    fingerprint: bytes  # 16 bytes, of the schema; zeros: any payload
    slot_count: int
    slot_capacity: int  # payload bytes per slot, as asked (areas are rounded up to pages)
    taken_over: bool
    torn: int  # payloads that `create` found in the file with other bytes than were published, and freed
    owner: int  # own index, -1 for an observer
    closed: bool

    @staticmethod
    def create(
        name: str,
        slot_count: int,
        slot_capacity: int,
        fingerprint: bytes,
        *,
        file: str = "",
        synced: bool = False,
        begins: bool = True,
    ) -> Ring:
        """Create a segment. With a ``file`` (an absolute path) the name leads there, and all of the above is said of
        the file; LayoutError then also of what is no ring. ``synced``: `publish` syncs first. ``begins``: see `begun`.
        """
    @staticmethod
    def attach(name: str, role: int, *, writable_payload: bool = False, set_up: bool = False) -> Ring:
        """Attach. ``set_up``: also while the ring is being set up, which else is not found."""
    def close(self) -> None:
        """Give up pins, owner place and locks; unmap when the last exported memory is gone. Idempotent.

        A slot that is lent (`Loan`) stays this owner's until the last loan of it ends, and the place and
        its lock until the last loan of all.
        """
    def leave(self, *, give_up_unread: bool, only_empty: bool) -> int:
        """close, and with the last loan `unlink_if_last` (``only_empty``: if no payload is left).

        ``give_up_unread`` discards every payload that is not consumed; how many.
        """
    @property
    def lent(self) -> int: ...  # loans that have not ended
    def end_reading(self) -> None:
        """End what a closed ring has lent to be read, at the end of the process. Its memory stays mapped."""
    def unlink_if_last(self, *, readers_may_stay: bool = False, gives_up_to: int = ...) -> bool:
        """Remove the segment's name if no other owner (or none but readers) is alive and no other process keeps it.

        ``gives_up_to``: unread payloads go with it only if `sequence` is not beyond this; 0: none does. The default
        gives all of them up. It is checked while no process can join.
        """
    @staticmethod
    def unlink_if_dead(name: str, *, gives_up_to: int = ...) -> bool:
        """Remove a segment whose keeper and owners are all dead. False if one lives. RingNotFoundError. A file stays.

        ``gives_up_to`` as in `unlink_if_last`; then also RingNotFoundError for a file in the making and LayoutError,
        which keep the segment.
        """
    @property
    def sequence(self) -> int: ...  # advances with each publication and each take-over
    @property
    def keeper_alive(self) -> bool: ...
    def supervise(self) -> bool:
        """Try to become the ring's supervisor, of which there is one at a time; True if it is this attachment now."""
    @property
    def supervised(self) -> bool:
        """Return whether a living process, or this one, is the ring's supervisor."""
    @property
    def still_named(self) -> bool:
        """False: closed, or the segment was removed, or its name is that of a newer one."""

    # --- the transitions (names of the protocol's table; False/None: refused, nothing changed) ----
    def try_take(self) -> Loan | None:
        """FREE → WRITING."""
    def take(self, timeout_s: float) -> Loan | None:
        """try_take, waiting on the futex while full (and reclaiming dead owners' slots); None after timeout_s."""
    def try_overwrite(self) -> Loan | None:
        """oldest READY, which no owner pins → WRITING, generation+1."""
    def pin(self, slot: int, generation: int, rank: int) -> int:
        """Return a pin, which goes with a `Loan` of the slot, or with this attachment."""
    @overload
    def begin_read(self, slot: int, generation: int, key: int, length: int, rank: int) -> Loan | int: ...
    @overload
    def begin_read(
        self, slot: int, generation: int, key: int, length: int, rank: int, most_lent: int
    ) -> Loan | int | None:
        """pin, if key, deadline and length allow it: a loan, with which the pin goes; else an answer, and no pin.

        None, nothing done: ``most_lent`` loans of this attachment have not ended. The payload counts as read
        (``bytes_mapped``).
        """
    def consume(self, slot: int, generation: int, rank: int) -> bool: ...
    def discard(self, slot: int, generation: int) -> bool: ...
    def discard_unread(self) -> int:
        """Every payload that is not consumed; how many."""
    def reclaim(self) -> int:
        """Clear the bits of every owner proven dead, and end its claims; number of slots changed."""

    # --- claims: a pin and the rank's claim word ----------------------------------------------------
    def claim_batch(
        self,
        most: int,
        timeout_s: float,
        *,
        rank: int = 0,
        most_bytes: int | None = None,
        oldest_version: int | None = None,
        most_attempts: int = 0,
        consumer: str = "",
    ) -> ClaimedBatch:
        """Claim up to ``most`` payloads that are unclaimed for this rank, the oldest first; waits for the first one.

        No more than ``most_bytes``, unless the first one alone has more. What is older than ``oldest_version``, was
        claimed ``most_attempts`` times (0: no limit) or is past its deadline is ended and logged instead. Claims of
        owners that are dead, or silent for longer than their own lease, end within a second of this call.
        """
    def set_lease(self, lease_s: float | None) -> None:
        """Claims of this attachment end when it is silent for so long; None: never. The longest ever asked for counts.

        Every claim, and every end of one, is a sign of life.
        """
    def heard(self) -> None:
        """Give a sign of life, and nothing else."""
    def outcome(self, token: int, slot: int, generation: int, rank: int, attempts: int) -> int:
        """Return the outcome of a claim that the connection of this token finished.

        0: unknown, 1: undecided as long as its listener is at it, 2: accepted, 3: refused. What has not been consumed
        by now is not consumed any more for that connection.
        """
    @staticmethod
    def wait_any(
        rings: Sequence[Ring], seen: Sequence[int], timeout_s: float, bell: Bell | None = None, rung: int = 0
    ) -> None:
        """Wait until a `published_event`, or the bell's `rung`, differs from what was seen; return early now and
        then."""
    def due_s(self, rank: int) -> float:
        """Seconds until the earliest delay ends that the last claim for this rank came upon; centuries: none."""
    def claim_word(self, slot: int, rank: int) -> tuple[int, int]:
        """Return who holds this rank's delivery, an owner's place or -1, and how often it was claimed."""
    def depth(self, rank: int) -> dict[str, int]:
        """Deliveries of a rank: ready, claimed; since the ring was made: done, discarded, dead, aged, retried, expired
        (claims that ended with their holder)."""
    def failures(self) -> list[tuple[int, int, int, int, str, str, str, int]]:
        """Return the last that ended unconsumed, the latest published first: slot, generation, rank, attempts,
        how, reason, consumer, sequence."""

    # --- looking ---------------------------------------------------------------------------------
    def info(self, slot: int) -> SlotInfo: ...
    def note(self, slot: int, generation: int) -> bytes | None: ...
    def payload(self, slot: int) -> memoryview:
        """Return the slot's payload area of slot_capacity bytes, writable where mapped so. Keeps the mapping alive."""
    def state_counts(self) -> tuple[int, int, int, int]: ...
    @property
    def unread(self) -> int:
        """Payloads that a rank has not consumed; one that all consumed may still be READING, for a view of it."""
    def left(self, rank: int) -> int:
        """Return how many payloads a rank has not consumed, with slots being written; it only falls once `ended`."""
    def counters(self) -> dict[str, int]:
        """Return sums over all owners, living and dead: takes, overwrites, publishes, aborts, pins, unpins,
        consumes, late_finalises, discards, reclaimed_writing, reclaimed_reading, stale_pins, full_waits,
        bytes_published, torn, and bytes read by wire: bytes_mapped, bytes_shm, bytes_tcp, bytes_rdma, bytes_cuda.
        takes + overwrites = publishes + aborts + reclaimed_writing + slots in WRITING; an overwrite is no take,
        `Loan.consume` is a consume and an unpin. A process that is killed between a transition and its count leaves a
        sum one short."""
    def count(self, name: str, amount: int) -> None: ...
    def own_count(self, name: str) -> int:
        """Return a counter's share of this owner place, earlier owners included; of an observer: of all observers."""
    def owners(self) -> list[OwnerInfo]: ...
    def own_pins(self, slot: int) -> int:
        """Count the pins of this attachment on the slot."""
    def heartbeat(self) -> None: ...

    # --- what listeners and writers tell each other ------------------------------------------------
    def ports(self) -> tuple[int, ...]: ...
    def set_ports(self, ports: tuple[int, ...]) -> None: ...
    def set_own_port(self, port: int) -> None: ...
    addresses: str  # advertised addresses, comma separated, at most 1000 bytes
    consumers: str  # names with how many ranks each has, "name:ranks,…", at most 400 bytes
    schema: bytes  # encoded, at most MAX_SCHEMA bytes; empty: none, or a longer one

    # --- the data ----------------------------------------------------------------------------------
    @property
    def begun(self) -> bool:
        """True from when the writer has set it, also when closed. Before, the ring is being set up.

        One that was taken over stays as it was left until this is set again.
        """
    @begun.setter
    def begun(self, begun: bool) -> None: ...
    @property
    def ended(self) -> bool:
        """True when the writer has said that it writes nothing more. A successor takes it back when it begins."""
    @property
    def drained(self) -> bool:
        """Ended, and every payload is consumed or given up."""
    def end_data(self) -> None: ...
    def only_serve(self) -> None: ...
    @property
    def takers(self) -> int:
        """Connections of trainers that live; for some seconds also those that were lost with their listener. They hear
        the end, also as they come again, and leave."""
    @property
    def pending(self) -> int:
        """Payloads that are unread; of a drained ring the `takers`, which are yet to hear that it is."""

    # --- waiting -----------------------------------------------------------------------------------
    def freed_event(self) -> int:
        """Value of the event counter that every freed slot advances."""
    def wait_freed(self, seen: int, timeout_s: float) -> bool:
        """Wait until the counter differs from seen. False after timeout_s."""
    def published_event(self) -> int: ...
    def wait_published(self, seen: int, timeout_s: float) -> bool: ...
    def claimed_event(self) -> int:
        """Value of the event counter that the next claim advances; claims that nobody expects so advance none."""
    def wait_claimed(self, seen: int, timeout_s: float) -> bool: ...

@final
class Loan(Buffer):
    """Memory of a slot that this owner holds, and which stays its own while anything looks into it: see `Ring.close`.

    To be written it is the whole slot; to be read it is the payload, read-only. A loan that is not ended gives the slot
    back with the object: unpublished, or for another attempt.
    """

    slot: int
    generation: int
    ended: bool

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    def __init__(self, ring: Ring, slot: int, generation: int, length: int) -> None:
        """Make the lease of a payload that the ring has pinned."""
    def publish(
        self,
        length: int,
        checksum: int,
        readers: int,
        deadline_ns: int,
        note: bytes,
        policy_version: int | None = None,
    ) -> bool:
        """Publish, WRITING, mine → READY, and end. False: it was not WRITING, or had ended."""
    def release(self) -> bool:
        """Give up, WRITING, mine → FREE, or unpin; and end. False: it had ended."""
    def consume(self, rank: int) -> bool:
        """Consume and unpin in one swap, and end. False: it had ended, or the rank was consumed elsewhere."""

@final
class OwnedClaims:
    """Claims of a connection that this object owns, by their positions in one answer. They go back with it."""

    begin: int  # the first position
    def __len__(self) -> int: ...
    def take(self, count: int) -> OwnedClaims:
        """Return the first ``count`` of them, which the new object owns from here on."""
    def settled(self) -> None:
        """Note that they have ended: nothing goes back."""

@final
class DroppedClaims:
    """Claims whose owners have gone; any thread may drop an owner. Nothing in a forked child."""

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """Readable while there are any."""
    def owned(self, number: int, count: int) -> OwnedClaims:
        """Return the owner of positions 0..count-1 of what the caller knows by this number."""
    def close(self) -> None:
        """Every claim has ended: from here on nothing is noted. Idempotent."""
    def take(self) -> list[tuple[int, int, int]]:
        """Take number, first and last position + 1 of each drop, once."""

@final
class WritePlan:
    """Payloads to be written in one call: looked at first, then published until no slot is free."""

    def __init__(
        self,
        fields: Sequence[tuple[str, object, tuple[int, ...], int, bool, bool]],
        array_type: type,
        head: bytes,
        middle: bytes,
        metadata: bytes,
    ) -> None:
        """fields: name, dtype, shape, itemsize, ragged and optional of each tensor; then what all tickets share."""
    def add(self, values: object, metadata: bytes | None) -> bool:
        """Add a payload. False, nothing added: not a dict of contiguous arrays that are exactly as the fields say."""
    def add_placed(
        self,
        total: int,
        lengths: Sequence[int],
        placed: list[tuple[int, Buffer]],
        middle: bytes | None,
        metadata: bytes | None,
    ) -> None:
        """Add a payload by the offset and memory of each tensor, ascending."""
    def largest(self) -> tuple[int, int]:
        """Bytes of the largest payload, and of the longest note that one may get."""
    def write(
        self,
        ring: Ring,
        lease: tuple[int, int] | None,
        readers: int,
        created: float,
        deadline: float | None,
        policy_version: int | None,
    ) -> int:
        """Publish, into the lease first, until no slot is free; how many payloads are left."""
    def notes(self, first: int) -> list[bytes]:
        """Return the encoded tickets of those that are published, from this one on."""
    def __len__(self) -> int: ...

@final
class BatchFields:
    """The tensors of a schema: bytes of a row, entries at most, ragged and optional of each. Not ragged: one row."""

    def __init__(self, rows: list[tuple[int, int, bool, bool]]) -> None: ...

BATCH_COLUMNS: tuple[str, ...]

@final
class ClaimedBatch(Buffer):
    """Payloads of one ring that were claimed together; exports the memory of the ring's payloads, read-only.

    What is neither consumed nor given back goes back with the object, and kept memory is let go. Not for several
    threads at a time, which is refused (UsageError).
    """

    ring: str
    """Its id."""
    wire: Literal["mapped"]
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def place(self, index: int) -> tuple[Any, int]:
        """Return this object, and where the payload's bytes begin in its memory."""
    def strange(self, fingerprint: str) -> list[int]:
        """Return the payloads whose tickets name another schema, but for those that cannot be read."""
    def marked(self, text: bytes) -> list[int]:
        """Return the payloads whose tickets have this text."""
    def columns(self, out: Any) -> None:
        """BATCH_COLUMNS, a row of int64 for each."""
    def empty(self) -> list[int]:
        """Return the payloads without bytes."""
    def measure(self, fields: BatchFields, out: Any) -> list[int]:
        """Numbers in tickets of the counted tensors, a row of int64 for each; the payloads that do not fit."""
    def gather(
        self, fields: BatchFields, targets: list[tuple[Any, int, int, bool, bytes] | None], verify: bool
    ) -> list[int]:
        """Copy each field to its memory: bytes from row to row, of the first row, packed, pattern behind a payload's
        rows; None: it stays where it is. The payloads whose checksum is wrong."""
    def verify(self) -> list[int]:
        """Return the payloads whose checksum is wrong."""
    def finish(self, keep: bool = False) -> bytes:
        """Consume: 1 for each whose claim was held, else 0; the same when it is called again. ``keep``: the memory of
        those that count stays until `release`, or the end of this object."""
    answered: Literal[True]
    """`finish` has the ring's answers at once."""
    def consumption(self) -> bytes:
        """Return the answer to `finish` again."""
    def in_question(self) -> bytes:
        """Return 0 for each: a mapped ring always answers."""
    def renew(self) -> int:
        """`Ring.heard`; how many are held."""
    def consume(self, index: int) -> bool:
        """Take the payload out of the batch, consumed. False: others have it."""
    def drop(
        self,
        index: int,
        reason: str,
        dead: bool,
        consumer: str = "",
        delay_s: float = 0.0,
        in_vain: bool = True,
    ) -> None:
        """Take the payload out of the batch, dead or to be claimed again after the delay."""
    def divide(self) -> list[ClaimedBatch]:
        """Each payload as a batch of its own; this one has none then."""
    def release(self, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """Give back what was not finished, after the delay, and let kept memory go. Idempotent."""
    def note(self, index: int) -> bytes:
        """Return the encoded ticket."""

RECEIVED_ROWS: tuple[str, ...]
TAKEN_FIELDS: tuple[tuple[str, str], ...]
"""Name and numpy format of each field of a payload's row in the answer to TAKE, without gaps between them."""

class ReceivedPayloads:
    """Payloads in this process's own memory, for batches; says nothing about claims."""

    @overload
    def __init__(self, memory: list[Any], rows: Any, columns: Any) -> None:
        """Payloads in pieces of memory. ``rows`` are RECEIVED_ROWS, a row of 64-bit numbers for each, contiguous: where
        payloads and their tickets lie, the checksum, and 1 where it need not be compared any more; ``columns`` are
        BATCH_COLUMNS."""
    @overload
    def __init__(self, answer: Any, count: int, own: dict[int, Any] | None) -> None:
        """Have the payloads of an answer to a TAKE that fits, verified; ``own``: by position, memory of those
        that did not come with it; None: no bytes were asked for."""
    @overload
    def __init__(self, other: ReceivedPayloads, count: int) -> None:
        """Have the first payloads of another one, which keeps the others."""
    def __len__(self) -> int: ...
    def columns(self, out: Any) -> None:
        """Do as `ClaimedBatch.columns`."""
    def strange(self, fingerprint: str) -> list[int]:
        """Do as `ClaimedBatch.strange`."""
    def empty(self) -> list[int]:
        """Do as `ClaimedBatch.empty`."""
    def measure(self, fields: BatchFields, out: Any) -> list[int]:
        """Do as `ClaimedBatch.measure`."""
    def gather(
        self, fields: BatchFields, targets: list[tuple[Any, int, int, bool, bytes] | None], verify: bool
    ) -> list[int]:
        """Do as `ClaimedBatch.gather`."""
    def verify(self) -> list[int]:
        """Return the payloads whose checksum is wrong."""
    def leave(self, index: int) -> None:
        """Take the payload out of the batch."""
    def marked(self, text: bytes) -> list[int]:
        """Do as `ClaimedBatch.marked`."""
    def place(self, index: int) -> tuple[Any, int]:
        """Return the piece that has the payload's bytes, and where they begin in it."""
    def note(self, index: int) -> bytes:
        """Return the encoded ticket."""

def copy(destination: Buffer, source: Buffer) -> None:
    """Contiguous bytes to contiguous bytes of the same length."""

def check_tree(data: Buffer, most_depth: int, most_values: int) -> str | None:
    """Say what is wrong with these bytes as a MessagePack tree whose extensions hold arrays; None: nothing."""

def checksum(data: Buffer) -> int:
    """XXH3, 64 bits."""

def slot_key(secret: bytes, slot: int, generation: int) -> int:
    """Return a payload's unguessable key: SipHash-2-4 of slot and generation (u32, little-endian) under the secret."""

@final
class Checksum:
    """XXH3 over several pieces; `copy` moves and hashes in one pass over memory."""

    def __init__(self) -> None: ...
    def update(self, data: Buffer) -> None: ...
    def copy(self, destination: Buffer, source: Buffer) -> None: ...
    def digest(self) -> int: ...

@final
class Block(Buffer):
    """Writable bytes, aligned to 64; from 64 KiB on to pages, and in huge ones where they are large enough.

    Whatever exports its buffer holds it, so the memory goes back to the pool when the last reference and the last view
    are gone, on whichever thread.
    """

    address: int
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def read_only(self) -> BlockView: ...
    def __len__(self) -> int: ...

@final
class BlockView(Buffer):
    """The same bytes, read-only; holds the block. No array of it can be made writable."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

@final
class BufferPool:
    """Host memory by size class: what comes back is lent again before anything new. Any thread."""

    def __init__(self, most_idle_bytes: int = 1 << 30) -> None: ...
    def take(self, size: int) -> Block:
        """Return a block of exactly ``size`` bytes, its content whatever was there. MemoryError."""
    def clear(self) -> None:
        """Let go of everything idle."""
    idle_bytes: int  # kept for the next payloads, at most most_idle_bytes
    lent: int  # blocks that are still in use

def size_class(size: int) -> int:
    """Bytes allocated for ``size``: the next of four steps per power of two, at least 4096."""

@final
class Event:
    """A futex counter in the first 4 bytes of a file, mapped shared: wakes other processes without polling."""

    def __init__(self, path: str) -> None:
        """Open or make the file (mode 0600)."""
    def value(self) -> int: ...
    def advance(self) -> None:
        """Add one and wake every waiter."""
    def wait(self, seen: int, timeout_s: float) -> bool: ...
    def close(self) -> None: ...

def segments() -> list[str]:
    """Names of this project's ring segments on this host ("/transport-…"); what cannot be a ring's name is left out."""

# test build only
def set_fault(point: str, signal: int, after: int = 0) -> None:
    """Send `signal` to this process at the named step, after it was passed `after` times."""

def report_faults(descriptor: int) -> None:
    """Write "process point signal" there, one line, before a signal is sent."""

FAULT_POINTS: tuple[str, ...]
