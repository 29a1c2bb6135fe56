"""Statistics of a host's clients for `transport top`: one abstract UNIX socket for each client.

An abstract socket has no file: however its process ends, nothing is left. A process of the same user or root that
connects receives the client's statistics as one JSON document, and the connection is closed. Clients in another network
namespace are not visible.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import msgspec

from transport.client.payload import ClientStatistics
from transport.decoders import json_decoder

log = logging.getLogger(__name__)

_NAME: Final = "transport-client-"
_TABLE: Final = Path("/proc/net/unix")
_ANSWER_S: Final = 0.5  # so that a suspended client does not delay the others
_MOST_BYTES: Final = 1 << 16
_MOST_RINGS: Final = 1000
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid

_open: weakref.WeakSet[StatusSocket] = weakref.WeakSet()


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One client of this host.

    Attributes:
        places: where its rings are looked for; "": it has tickets.
        rings: ids of some rings that it is connected to; those that it maps have its process among their readers.
        nothing: why no payload comes; empty: some come, or none is asked for.
    """

    pid: int
    program: str
    statistics: ClientStatistics
    places: str = ""
    rings: tuple[str, ...] = ()
    nothing: str = ""


class StatusSocket:
    """Socket that answers for one client, on its loop. Without it `transport top` does not show the client."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        statistics: Callable[[], ClientStatistics],
        rings: Callable[[], tuple[str, Collection[str]]],
        why_nothing: Callable[[], str],
    ) -> None:
        self._loop = loop
        self._statistics = statistics
        self._rings = rings
        self._why_nothing = why_nothing
        self._listening: socket.socket | None = None
        listening = None
        try:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            listening.bind(f"\0{_NAME}{os.getpid()}-{secrets.token_hex(4)}")
            listening.listen(4)
            loop.add_reader(listening, self._answer)
        except OSError as error:
            log.debug("no status socket: %s", error)
            if listening is not None:
                listening.close()
            return
        self._listening = listening
        _open.add(self)

    def _answer(self) -> None:
        if self._listening is None:
            return
        with contextlib.suppress(OSError):  # the asking process has disconnected or does not receive
            asking, _ = self._listening.accept()
            with asking:
                if _user_of(asking) in (os.getuid(), 0):
                    asking.setblocking(False)
                    asking.send(msgspec.json.encode(self._status())[:_MOST_BYTES])

    def _status(self) -> ClientStatus:
        program = Path(sys.argv[0] or "python").name
        places, rings = self._rings()
        return ClientStatus(
            pid=os.getpid(),
            program=program,
            statistics=self._statistics(),
            places=places,
            rings=tuple(rings)[:_MOST_RINGS],
            nothing=self._why_nothing(),
        )

    def close_in_child(self) -> None:
        """Close the socket in a forked child: client and loop belong to the parent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            os.close(listening.detach())  # detached, because the inherited loop would keep the socket open

    def close(self) -> None:
        """Stop answering. Idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            self._loop.remove_reader(listening)
            listening.close()


def _close_in_child() -> None:
    for each in list(_open):
        each.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def clients(table: Path = _TABLE) -> list[ClientStatus]:
    """All clients of this host and user that answer, by process."""
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    names = {line.rpartition("@")[2] for line in lines if f"@{_NAME}" in line}
    found = [status for name in sorted(names) if (status := _ask(name)) is not None]
    return sorted(found, key=lambda status: status.pid)


def _ask(name: str) -> ClientStatus | None:
    with (
        contextlib.suppress(OSError, msgspec.MsgspecError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking,
    ):
        asking.settimeout(_ANSWER_S)
        asking.connect(f"\0{name}")
        if os.getuid() not in (0, _user_of(asking)):  # another user may have taken such a name
            return None
        answer = b""
        while len(answer) < _MOST_BYTES and (piece := asking.recv(_MOST_BYTES)):
            answer += piece
        return json_decoder(ClientStatus)(answer)
    return None


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
