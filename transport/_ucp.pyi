"""Interface of the native engine (native/ucp). It needs the UCX library that ucxx loads; see transport/wire/library.py.

Everything belongs to one thread. A ``token`` is the future that gets the outcome: `Engine.drive`, `collect` and `close`
return pairs (token, outcome), where an outcome is a number, a list of numbers, or (status, peer) of a failure with a
negative UCX status; a `Listener`'s pairs are (its callback, Endpoint), or its callback and a failure to make one.

``memory`` is anything with the buffer protocol, writable for a receive, or a tuple (address, bytes, object that keeps
it) for memory of any kind; of a kind that is not the host's only for reads that are not small, without a checksum.
It stays exported until UCX has completed the request.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from typing_extensions import Buffer

from transport import _ring
from transport.ticket import Ticket

_Memory: TypeAlias = Buffer | tuple[int, int, object]
_Outcome: TypeAlias = int | list[int] | tuple[int, str]
# `wire.Record`; or an acknowledgement: ring, slot, generation, rank, key
_Record: TypeAlias = tuple[int, int, int, int, int, int, int, int] | tuple[str, int, int, int, int]
# ticket, rank, destination (_Memory), checksum to verify, where a range begins
_Want: TypeAlias = tuple[Ticket, int, Any, int | None, int | None]

class UcxFault(Exception):
    """UCX refused at once; args are (status, message)."""

# UCX's statuses, negative
ERR_BUSY: int
ERR_NO_DEVICE: int
ERR_UNREACHABLE: int
ERR_NOT_CONNECTED: int
ERR_REJECTED: int
ERR_INVALID_PARAM: int
ERR_INVALID_ADDR: int
ERR_CANCELED: int
ERR_CONNECTION_RESET: int

def status_text(status: int) -> str: ...
def knows_cuda_memory(context: int) -> bool:
    """Return whether the context (a ucp_context_h) tells CUDA memory from the host's."""

# outcomes of a read beside 0 and the listener's refusals (1 to 255)
WRONG_CHECKSUM: int
WRONG_LENGTH: int
PROTOCOL: int  # of the whole message: its answer does not fit

@final
class Engine:
    descriptor: int  # readable when there is something to do, while it is ``armed``
    requests: int  # under way
    abandoned: int  # that UCX will never complete: their peer died in the middle of a message
    closed: bool
    armed: bool  # nothing has to be driven before the descriptor says so
    dropped: int  # messages that arrived without a posted receive

    def __init__(self, context: int, worker: int, owner: object) -> None:
        """``context`` is a ucp_context_h, ``worker`` a ucp_worker_h of it, ``owner`` what keeps both."""
    def drop_unexpected(self) -> None:
        """Drop from now on what no receive stands for. A `Service` sorts: what its clients ask ahead is kept."""
    def drive(self, spin_s: float) -> list[tuple[Any, Any]]:
        """Progress without the GIL. Unless it is ``armed`` after that, call it again soon."""
    def collect(self) -> list[tuple[Any, Any]]:
        """Collect what has come to an end, without progress."""
    def close(self) -> list[tuple[Any, Any]]:
        """Abort every endpoint, close the listeners; UCX is out of all memory. Idempotent."""

@final
class Endpoint:
    peer: str  # address and port
    open: bool  # not aborted by this side
    alive: bool  # and the peer is not known to be gone
    failure: int  # status, 0 while alive
    refused: bool  # a receive failed for want of something on this side, such as memory that may be locked
    under_way: int  # requests

    @staticmethod
    def connect(engine: Engine, address: str, port: int) -> Endpoint: ...
    def send(self, token: object, memory: _Memory, tag: int) -> None: ...
    def receive(self, token: object, memory: _Memory, tag: int) -> None: ...
    def send_stream(self, token: object, memory: _Memory) -> None: ...
    def receive_stream(self, token: object, memory: _Memory) -> None: ...
    def abort(self) -> None: ...
    def probe(self) -> bool:
        """Return whether an empty message, which has no receiver, left without waiting."""
    def transports(self) -> list[tuple[str, str]]: ...

@final
class Listener:
    port: int

    def __init__(
        self, engine: Engine, address: str, port: int, most: int, arrived: Callable[[Any], object]
    ) -> None: ...
    shut: bool  # the reserve of descriptors is in use

    def end_strangers(self, patience_s: float) -> bool:
        """End who has connected and has sent no valid connection request in time; True: some still have time."""
    def close(self) -> None: ...

@final
class Link:
    """The client's side of a connection after its handshake."""

    next_number: int
    alive: bool
    usable: bool  # alive, and with numbers left for a request and a farewell
    under_way: int  # messages without their answer
    token: int  # of the connection, for OUTCOME

    def __init__(self, endpoint: Endpoint, tag_base: int, their_base: int, inline_limit: int) -> None: ...
    def read(self, token: object, wants: Sequence[_Want], acks: Sequence[_Record]) -> int:
        """One message; its number. Outcome: a number for one want, a list for several."""
    def ask(self, token: object, record: _Record, before: Sequence[_Record]) -> int:
        """Outcome: [code, value]."""
    def tell(self, records: Sequence[_Record]) -> int: ...
    def take(
        self,
        token: object,
        memory: object,
        *,
        most: int,
        wait_ms: int,
        most_bytes: int,
        joined_most: int,
        rank: int,
        oldest_version: int,
        most_attempts: int,
        verify: bool,
        told: int,
    ) -> int:
        """TAKE into memory of `room_for` bytes; ``told``: what the last answer said is left. Outcome: [code, payloads,
        what is left or MORE_TO_COME, positions of those with wrong bytes …]."""
    def settle(
        self, token: object, rows: object, kind: int, delay_ms: int = 0, key: int = 0, unread: bool = False
    ) -> int:
        """FINISH, GIVE_BACK or OUTCOME for up to 63 claims, rows of `wire.TAKEN`. Outcome: a list of codes.

        ``unread``: what goes back does not count as delivered.
        """
    def end(self, token: object, row: object, how: int, reason: str, consumer: str) -> int:
        """END for one claim; ``how`` as `Ended` of transport/wire/frames.py. Outcome: a list of one code."""

MOST_TAKEN: int
MOST_TAKEN_BYTES: int
MORE_TO_COME: int

def room_for(most: int, most_bytes: int) -> int:
    """Bytes of the longest answer to a TAKE."""

def taken(memory: object, count: int) -> tuple[bytes, bytes, bool]:
    """Return, of an answer to a TAKE of so many payloads, rows of `wire.TAKEN`; where each ticket and then where each
    joined payload begins, 64 bits each; whether all are joined.
    """

# outcomes of a connection's ``ended``
END_GARBAGE: int
END_INTERNAL: int

@final
class Service:
    """Service that the connections of a listener share: the ring, limits, attempts by payload."""

    draining: bool  # while it is set, reads are told that the listener is busy
    inline_limit: int  # bytes up to which a payload is joined to its answer; fewer once the payloads are registered
    attempts: int
    waiting: int  # demands
    demand_descriptor: int  # readable when `look` should be called

    def __init__(
        self,
        engine: Engine,
        ring: _ring.Ring,
        *,
        inline_limit: int,
        slowest_rate: float,
        most_reads: int,
        most_unsent: int,
        numbers: int,
    ) -> None: ...
    def register_payloads(self) -> None:
        """Register the ring's payloads as a whole, so that no read registers any. Raises UcxFault."""
    def when_quiet(self, future: object) -> None:
        """Resolve the future as soon as there is no attempt."""
    def look(self) -> None:
        """Answer demands that have waited for what is published now, or long enough."""
    def dismiss(self) -> None:
        """Tell all who wait that the listener is busy."""
    def watch_no_more(self) -> None:
        """End the thread that waits for what is published, and the descriptor."""

@final
class Connection:
    """A client's connection after WELCOME. ``ended`` resolves once, to one of the END_ numbers."""

    last_active: float  # monotonic seconds
    attempts: int
    unsent: int  # answers and payloads under way
    waiting: int  # demands
    reason: str  # why it ended

    def __init__(
        self,
        service: Service | None,
        endpoint: Endpoint,
        tag_base: int,
        client_base: int,
        ended: object,
        lease_s: float = 0.0,
        takes: bool = False,
    ) -> None:
        """Begin to receive.

        Args:
            lease_s: of its claims, as the client has asked for it; 0: they end with the connection.
            takes: it may ask for payloads, and counts among the ring's takers, who are to hear the end.
        """

    def count_as(self, counter: str) -> None:
        """Count its payloads' bytes under this name of `Ring.counters`, such as "bytes_shm"; first "bytes_tcp"."""
    def end_consumed(self) -> None:
        """End attempts that were acknowledged through other listeners, or whose payload was given up."""
    def expire(self, before: float) -> int:
        """End reads that are late, and claims of a client that is silent for longer than its lease; how many. -1: UCX
        still reads one's slot, so only `close` ends it."""
    def close(self) -> None:
        """UCX is out of the slots' memory before their pins go."""
    def part(self, *, again: bool) -> None:
        """Give the client nothing more, who is asked to close.

        again: expect it behind `close` among the ring's takers, for the seconds in which it comes again."""
