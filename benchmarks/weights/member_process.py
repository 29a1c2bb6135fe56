"""A trainer or replica as a process, which process_member.py starts.

The first line of standard input is its configuration, each further line a request; the end of input ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import sys
from typing import Any, BinaryIO

import msgspec
import uvloop
from process_member import Answer, Request

from transport.decoders import convert, json_decoder
from transport.errors import UsageError
from transport.weights.engine import WeightsEngine
from transport.weights.options import EngineOptions
from transport.weights.transfer.threads import ended, in_thread
from transport.weights.worker import Replica, RolloutWorker, WeightsTrainer

_MOST_LINE = 64 << 20
_METHODS = frozenset(
    {
        *("prepare", "init_process_group", "send_weights", "land", "pause", "load", "restore", "prove", "resume"),
        *("finalize", "told", "statistics"),
    }
)


class MemberConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of a member.

    made: "module:class" of its `Source` (a trainer) or `RolloutWorker` (a replica), called with ``arguments``.
    engine: keyword arguments of `WeightsEngine`, and the fields of its `EngineOptions` beside them. What is made may
        have a ``layout``; ``in_place`` true: for its ``tensors``.
    """

    name: str
    made: str
    arguments: dict[str, Any] = {}
    engine: dict[str, Any] = {}


def make(config: MemberConfig) -> WeightsTrainer | Replica:
    """The member that a configuration describes."""
    further = set(EngineOptions.__struct_fields__)
    named = {key: value for key, value in config.engine.items() if key not in further}
    options = {key: value for key, value in config.engine.items() if key in further}
    module, _, name = config.made.partition(":")
    made = getattr(importlib.import_module(module), name)(**config.arguments)
    named["options"] = convert(options, EngineOptions)
    if hasattr(made, "progress"):
        named["progress"] = made.progress
    if named.pop("in_place", False):
        named["in_place"] = made.tensors
    engine = WeightsEngine(config.name, getattr(made, "layout", None), **named)
    if isinstance(made, RolloutWorker):
        return Replica(engine, made)
    if not hasattr(made, "weights"):
        raise UsageError(f"{config.made} is neither a RolloutWorker nor an object with weights(version)")
    return WeightsTrainer(engine, made)


class Answering:
    """Requests as tasks, answers as lines."""

    def __init__(self, member: WeightsTrainer | Replica, out: BinaryIO) -> None:
        self._member = member
        self._out = out
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, request: Request) -> None:
        """Begin a request, or cancel one."""
        if request.cancel:
            task = self._tasks.get(request.cancel)
            if task is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    async def _answer(self, request: Request) -> None:
        try:
            if request.method not in _METHODS:
                raise UsageError(f"unknown method {request.method!r} of a member")
            result = await self._call(request.method, request.arguments)
            answer = Answer(request.id, msgspec.to_builtins(result))
        except Exception as error:  # the process that asked raises it there: this one goes on to answer others
            answer = Answer(request.id, None, (type(error).__name__, " | ".join([str(error), *_notes(error)])))
        self._say(answer)

    async def _call(self, method: str, arguments: list[Any]) -> Any:
        if method == "told":  # a test's or benchmark's own question to its worker or source
            made: Any = self._member.worker if isinstance(self._member, Replica) else self._member.source
            return await in_thread(made.told, *arguments)
        if method == "statistics":
            return self._member.engine.statistics()
        return await getattr(self._member, method)(*arguments)

    def _say(self, answer: Answer) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._out.write(msgspec.json.encode(answer) + b"\n")
            self._out.flush()

    async def end(self) -> None:
        """Cancel what is under way, and give everything back."""
        await ended(*self._tasks.values())
        await self._member.engine.close()


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


async def serve(out: BinaryIO) -> None:
    """Answer until standard input ends."""
    reader = asyncio.StreamReader(limit=_MOST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    config = json_decoder(MemberConfig)(await reader.readline())
    answering = Answering(make(config), out)
    try:
        async for line in reader:
            answering.take(json_decoder(Request)(line))
    finally:
        await answering.end()


def main() -> int:
    """Run a member to its end."""
    logging.basicConfig(level="WARNING")
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to standard error
    uvloop.run(serve(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
