"""Members in processes of their own, driven over their standard input and output: one JSON object per line.

    {"id": 3, "method": "land", "arguments": [7]}
    {"id": 3, "result": …}   or   {"id": 3, "error": [kind, text]}
    {"cancel": 3}

`ProcessMember` is the manager's side; member_process.py is the process. A framework with its own remote calls (Ray's
actors) needs neither: it gives the manager objects with these methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from transport import errors
from transport.decoders import convert, json_decoder
from transport.errors import MemberFailedError, MemberLostError, TransportError
from transport.ring.attachment import remove_dead
from transport.weights.plan.steps import Metadata, VersionProof
from transport.weights.transfer.threads import ended, in_thread

_HERE = Path(__file__).resolve().parent
_STOP_S = 20.0
_MOST_LINE = 64 << 20
_untidy: set[str] = set()  # prefixes of ended members whose segments may be mapped by others


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line to a member. ``cancel``: the id of a request that is not waited for any more."""

    id: int = 0
    method: str = ""
    arguments: list[Any] = []
    cancel: int = 0


class Answer(msgspec.Struct, frozen=True):
    """A line from a member; ``error`` is (kind, text)."""

    id: int
    result: Any = None
    error: tuple[str, str] | None = None


class ProcessMember:
    """A trainer or replica in a process that `start` makes. Belongs to one loop.

    Attributes:
        lost: whether its process has ended.
        prefix: of its segments' names.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, prefix: str) -> None:
        self.name = name
        self.process = process
        self.prefix = prefix
        self.lost = False
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def __repr__(self) -> str:
        return f"<ProcessMember {self.name} process {self.process.pid}{', lost' if self.lost else ''}>"

    @classmethod
    async def start(
        cls,
        name: str,
        config: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        *,
        prefix: str | None = None,
        within: Sequence[str] = (),
    ) -> Self:
        """Start member_process.py, which is beside this file, with this `MemberConfig`.

        prefix: of its segments' names; default random.
        within: what stands before the command, such as what enters a network namespace.
        """
        given = {**os.environ, **(environment or {})}
        process = await asyncio.create_subprocess_exec(
            *within,
            sys.executable,
            "-P",  # without the current directory, which may hold anything
            str(_HERE / "member_process.py"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the manager's process, which ends its members in order
            limit=_MOST_LINE,
            env={**given, "PYTHONPATH": os.pathsep.join(filter(None, [str(_HERE), given.get("PYTHONPATH")]))},
        )
        prefix = prefix or f"weights-{secrets.token_hex(8)}-"
        member = cls(name, process, prefix)
        assert process.stdin is not None
        told = {"name": name, **config, "engine": {**config.get("engine", {}), "prefix": prefix}}
        process.stdin.write(msgspec.json.encode(told) + b"\n")
        return member

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            async for line in self.process.stdout:
                answer = json_decoder(Answer)(line)
                waiting = self._waiting.pop(answer.id, None)
                if waiting is None or waiting.done():
                    continue
                if answer.error is None:
                    waiting.set_result(answer.result)
                else:
                    waiting.set_exception(_error(self.name, *answer.error))
        finally:
            self.lost = True
            status = await self.process.wait()
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(MemberLostError(f"the process of {self.name} {how}"))
            self._waiting.clear()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method there. Raises what it raises, by its kind, and MemberLostError when the process ends."""
        stdin = self.process.stdin
        if self.lost or stdin is None:
            raise MemberLostError(f"the process of {self.name} has ended")
        self._last += 1
        number = self._last
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            with contextlib.suppress(OSError):  # the process ended: `waiting` raises MemberLostError
                stdin.write(msgspec.json.encode(Request(number, method, list(arguments))) + b"\n")
                await stdin.drain()
            return await waiting
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            with contextlib.suppress(OSError, RuntimeError):
                stdin.write(msgspec.json.encode(Request(cancel=number)) + b"\n")
            raise

    # --- what a manager calls -----------------------------------------------------------------------------------------
    async def pause(self) -> None:
        await self.call("pause")

    async def prepare(self) -> Metadata:
        found: Metadata = await self.call("prepare")
        return found

    async def init_process_group(self, arguments: dict[str, Any]) -> None:
        await self.call("init_process_group", arguments)

    async def send_weights(self, version: int) -> VersionProof | None:
        return _proof(await self.call("send_weights", version))

    async def land(self, version: int) -> VersionProof:
        proof = _proof(await self.call("land", version))
        if proof is None:
            raise MemberFailedError(f"{self.name}: land returned no proof for v{version}")
        return proof

    async def load(self) -> VersionProof | None:
        return _proof(await self.call("load"))

    async def restore(self) -> VersionProof | None:
        return _proof(await self.call("restore"))

    async def prove(self) -> VersionProof | None:
        return _proof(await self.call("prove"))

    async def finalize(self) -> None:
        await self.call("finalize")

    async def resume(self, generate: bool) -> None:
        await self.call("resume", generate)

    async def tidy(self) -> None:
        """Remove the segments that a killed process has left, once no process has them mapped any more."""
        await in_thread(remove_dead, self.prefix)

    async def close(self) -> None:
        """End the process: its input ends, and when that does not help it is killed. Idempotent.

        No segment stays of it, nor of members that ended before it and whose last reader it was.
        """
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await asyncio.wait([self._reading], timeout=_STOP_S)
        await ended(self._reading)
        _untidy.add(self.prefix)
        for prefix in list(_untidy):
            if await in_thread(remove_dead, prefix):
                _untidy.discard(prefix)


def _proof(value: Any) -> VersionProof | None:
    return None if value is None else convert(value, VersionProof)


def _error(name: str, kind: str, text: str) -> Exception:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, TransportError):
        return found(f"{name}: {text}")
    return MemberFailedError(f"{name}: {kind}: {text}")
