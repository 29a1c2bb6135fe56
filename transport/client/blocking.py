"""BlockingClient: UCXXClient for code without an event loop. Its loop runs in a thread of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar

from transport.client.client import UCXXClient, WirePolicy
from transport.client.connections.warming import CONCURRENCY
from transport.client.device_reads import DeviceReceive, target_of
from transport.client.payload import AckMode, ClientStatistics, Payload, ReadOutcome
from transport.errors import ClosedError, UsageError
from transport.runtime.loop_thread import LoopThread
from transport.schema import Schema
from transport.settings import DEFAULTS, Settings
from transport.store.directory import Directory
from transport.ticket import Ticket

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[UCXXClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingClient, P], T]:
    """Return the method of `UCXXClient`, waited for."""

    @functools.wraps(method)
    def waiting(self: BlockingClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        return self._thread.run(method(self._client, *arguments, **named))

    return waiting


class BlockingClient:
    """The same arguments and errors as `UCXXClient`; every call waits. Any thread may call, calls run concurrently."""

    def __init__(
        self,
        *,
        schemas: Sequence[Schema] = (),
        wire: WirePolicy = "auto",
        ack: AckMode = "on_arrival",
        secret: bytes | None = None,
        verify: bool = True,
        device: str | None = None,
        device_receive: DeviceReceive = "staged",
        directory: Directory | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        async def make(thread: LoopThread) -> UCXXClient:
            client = UCXXClient(
                schemas=schemas,
                wire=wire,
                ack=ack,
                secret=secret,
                verify=verify,
                device=device,
                device_receive=device_receive,
                directory=directory,
                settings=settings,
            )
            thread.closes(client.close)
            return client

        thread = LoopThread("transport blocking client")
        try:
            self._client = thread.run(make(thread))
            self._thread = thread
        except BaseException:  # also an interrupt: the caller has no object yet with which to close the thread
            thread.close()
            raise

    def __reduce__(self) -> NoReturn:
        """Raise UsageError, for `pickle` and `copy`."""
        raise UsageError("a client is not pickled: make one in each process")

    def __repr__(self) -> str:
        return f"<BlockingClient {self._client!r}>"

    def read(
        self,
        ticket: Ticket | str | bytes,
        out: Any = None,
        rank: int = 0,
        timeout: float | None = None,
        fields: Sequence[str] | None = None,
        ack: AckMode | None = None,
    ) -> Payload:
        """See `UCXXClient.read`. For `out` in device memory the current stream of this thread is used."""
        ticket = Ticket.of(ticket)
        target = None if out is None else target_of(out, ticket.size, elsewhere=True)
        payload = self._thread.run(
            self._client._reads.one(ticket, out if target is None else target, rank, timeout, fields)
        )
        if target is not None:
            target.make_stream_wait()
        # In this thread, which an interrupt may have ended before.
        return self._client._deliveries.hand_over(payload, out, ack)

    def read_many(
        self,
        tickets: Iterable[Ticket | str | bytes],
        *,
        rank: int = 0,
        timeout: float | None = None,
        concurrency: int = CONCURRENCY,
        fields: Sequence[str] | None = None,
    ) -> Iterator[ReadOutcome]:
        """See `UCXXClient.read_many`; yields a `ReadOutcome` for each ticket as it completes, with payload or error."""
        lists = self._client._reads.many(tickets, rank, timeout, concurrency, fields)
        try:
            while outcomes := self._thread.run(_next(lists)):  # a turn of the loop for each costs more than a read
                yield from self._client._deliveries.hand_over_all(outcomes)
        finally:
            if not (self._thread.closed or self._thread.is_current):  # there the loop itself ends what is collected
                self._thread.run(_end(lists))

    warm = _blocking(UCXXClient.warm)
    discard = _blocking(UCXXClient.discard)
    state = _blocking(UCXXClient.state)

    @property
    def acknowledges(self) -> AckMode:
        """See `UCXXClient.acknowledges`."""
        return self._client.acknowledges

    def schema_of(self, ticket: Ticket) -> Schema | None:
        """See `UCXXClient.schema_of`."""
        return self._client.schema_of(ticket)

    def ack(self, ticket: Ticket | str | bytes, rank: int = 0) -> bool:
        """See `UCXXClient.ack`."""
        return self._thread.run(_call(self._client.ack, ticket, rank))

    def statistics(self) -> ClientStatistics:
        """See `UCXXClient.statistics`."""
        return statistics_of(self._thread, self._client)

    def close(self) -> None:
        """Close the client and end its thread; at the process's exit at the latest. Idempotent.

        Nothing in a forked child: the client is its parent's.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def statistics_of(thread: LoopThread, client: UCXXClient) -> ClientStatistics:
    """Return the client's counters, on its loop; once that is closed, those of its end."""
    with contextlib.suppress(ClosedError):
        return thread.run(_call(client.statistics))
    return client.statistics()


async def _call(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


async def _next(lists: AsyncGenerator[list[ReadOutcome], None]) -> list[ReadOutcome]:
    return await anext(lists, [])


async def _end(lists: AsyncGenerator[list[ReadOutcome], None]) -> None:
    await lists.aclose()
