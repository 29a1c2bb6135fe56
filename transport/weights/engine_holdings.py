"""What both engines hold beside their plans: connections, versions, memory; and how all of it is given back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Collection, Iterable
from typing import Generic, Protocol, TypeVar

from transport.client.client import UCXXClient
from transport.errors import ClosedError, WeightsTimeoutError
from transport.weights.options import EngineOptions
from transport.weights.transfer.bucket_sender import BucketSender
from transport.weights.transfer.feed import Feed, Upstream, announce_failure
from transport.weights.transfer.messages import Failed
from transport.weights.transfer.pace import Pace
from transport.weights.transfer.threads import in_thread
from transport.weights.versions.copies import Copies


class _Version(Protocol):
    def release(self) -> None: ...


V = TypeVar("V", bound=_Version)


class EngineHoldings(Generic[V]):
    """Base of the engines. It belongs to one loop.

    Each step of an end is taken whatever the others raise, and where a cancellation comes in between.
    """

    def __init__(self, bucket_bytes: int, in_flight: int, address: str, options: EngineOptions) -> None:
        self._sender = BucketSender(
            bucket_bytes,
            in_flight,
            address=address,
            wires=None if options.wires is None else options.wires - {"mapped"} or None,
            secret=options.secret,
            pace=None if options.rate is None else Pace(options.rate),
            stall_s=options.stall_s,
            prefix=options.prefix,
        )
        self._join_s = options.join_s
        self._copies = Copies(options.prefix)
        self._client: UCXXClient | None = None
        self._feed: Feed | None = None
        self._held: V | None = None  # the current version
        self._previous: V | None = None  # the one before, until `finalize`
        self._process = os.getpid()

    @property
    def held(self) -> V | None:
        """The complete version that this member holds."""
        return self._held

    @property
    def previous(self) -> V | None:
        """The version before, which `revert` returns to; None after `finalize`."""
        return self._previous

    def _check_process(self) -> None:
        """ClosedError in a forked child, which has neither the connections nor the threads of its parent."""
        if self._process != os.getpid():
            raise ClosedError("a forked child does not have its parent's engine of weights; make one in the child")

    async def _join(
        self, name: str, feed: Feed, children: Collection[str], connecting: Awaitable[Collection[Upstream]]
    ) -> None:
        """Connect to the parents, and wait for the children; these are told of a failure.

        A parent that fails meanwhile ends the wait: its failure may be the reason why a child does not come.
        """
        try:
            try:
                async with asyncio.timeout(self._join_s):
                    await feed.joined(children, await connecting)
            except TimeoutError:
                missing = ", ".join(sorted(feed.missing(children))) or "an answer of its parents"
                raise WeightsTimeoutError(
                    f"{name}: the group was not complete within {self._join_s:g} s (join_s), missing: {missing}; "
                    "look at the logs of these"
                ) from None
        except BaseException as error:
            kind = type(error).__name__
            await announce_failure(feed, Failed(kind, str(error) or kind))
            raise

    async def _leave(self, upstreams: Iterable[Upstream]) -> None:
        """Leave the group, and release the version before the current one."""
        self._check_process()
        feed, self._feed = self._feed, None
        previous, self._previous = self._previous, None
        async with contextlib.AsyncExitStack() as stack:
            if previous is not None:
                stack.push_async_callback(in_thread, self._copies.trim)
                stack.push_async_callback(in_thread, previous.release)
            stack.callback(self._sender.abandon)
            if feed is not None:
                stack.push_async_callback(feed.close)
            for upstream in upstreams:
                stack.callback(upstream.close)

    async def _release(self) -> None:
        """Release everything that is left, the current version too."""
        self._check_process()
        held, self._held = self._held, None
        client, self._client = self._client, None
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(in_thread, self._copies.close)
            stack.push_async_callback(in_thread, self._sender.close)
            if client is not None:
                stack.push_async_callback(client.close)
            if held is not None:
                stack.push_async_callback(in_thread, held.release)
