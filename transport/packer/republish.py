"""Publishes what a writer that was killed had written and not yet published: ``python -m transport.packer.republish``.

The supervisor of its ring starts this process when the writer has ended, since it outlives it. The process reads what
is to be done as JSON from standard input, because a queue's URL may contain a password. It ends when every unread
payload of the ring is known to the queue. While the queue fails it tries again, until another writer has taken over the
ring, which then does the same, or the ring is gone.
"""

from __future__ import annotations

import logging
import sys
import time

import msgspec

from transport.config import LogFormat, LogLevel
from transport.errors import QueueError, QueueUnsuitableError, RingNotFoundError, TransportError
from transport.packer.publisher import Publisher
from transport.packer.unpublished import compared
from transport.queue.base import QueueAddress
from transport.queue.redis import open_address
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.logs import handler

log = logging.getLogger(__name__)

MODULE = "transport.packer.republish"
_PAUSE_FIRST_S, _PAUSE_MOST_S = 0.1, 2.0


class Republishing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of which ring, to which queue.

    Attributes:
        grouped: all ranks of a payload are one delivery.
    """

    segment: str
    queue: QueueAddress
    grouped: bool = False
    log_level: LogLevel = "WARNING"
    log_format: LogFormat = "text"


def republish(task: Republishing) -> int:
    """How many tickets a killed writer had left, which are published now; 0 where another writer has taken over.

    Raises RingNotFoundError when the ring is gone.
    """
    left = 0
    pause_s = _PAUSE_FIRST_S
    while True:
        with SharedRingBuffer.attach(task.segment, role="observer") as ring:
            if ring.native.keeper_alive:
                return 0
            try:
                with open_address(task.queue) as queue:
                    missing = compared(ring, queue, grouped=task.grouped, free=False).missing
                    if len(missing) < left:  # the queue is full and takes some
                        pause_s = _PAUSE_FIRST_S
                    left = max(left, len(missing))
                    Publisher(queue, "immediate", len(missing)).add(missing)
                    return left
            except QueueUnsuitableError:
                raise
            except QueueError as error:
                log.warning("what a killed writer had not published is not in the queue yet, trying again: %s", error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MOST_S)


def main() -> int:
    """Entry point. Exit status 0 when nothing is left to be done."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Republishing)
    logging.basicConfig(level=task.log_level, handlers=[handler(task.log_format, "republish")])
    try:
        published = republish(task)
    except RingNotFoundError:
        return 0
    except TransportError as error:
        log.error("what a killed writer had not published is not in the queue: %s", error)  # no trace
        return 1
    if published:
        log.warning("published %d tickets that a killed writer had left", published)
    return 0


if __name__ == "__main__":
    sys.exit(main())
