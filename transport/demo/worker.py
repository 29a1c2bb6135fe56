"""What rollout and trainer processes have in common: how they are told what to do, report, and are stopped.

A worker's configuration is the first line of its standard input. The end of that input means: stop, in order. It
comes when the parent closes the pipe, and also when the parent is killed, so that no worker outlives it. What a worker
reports is a line of JSON on its standard output, its kind under "type".
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO, Final

import msgspec

from transport.client.trace import Trace
from transport.demo.plan import WorkerConfig
from transport.errors import TransportError

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5  # longest wait for anything before looking whether to stop
_STDIN, _STDOUT, _STDERR = 0, 1, 2


# --- what a worker reports ------------------------------------------------------------------------------
class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A trainer has consumed another batch. Bytes and wires are since its start."""

    consumed: int  # in all lives of a run
    bytes: int
    wires: list[str]
    mean_return: float  # of this batch


class RolloutDone(msgspec.Struct, frozen=True, kw_only=True, tag="rollout done"):
    """A rollout has published its share."""

    published: int
    pauses_s: list[float]  # of each version that it took from the trainer: how long it did not play
    policies_missed: int  # announced, but replaced by a newer version before they were read


class TrainerDone(msgspec.Struct, frozen=True, kw_only=True, tag="trainer done"):
    """A trainer has seen every episode."""

    consumed: int
    duplicates: int
    stale: int
    retries: int
    bytes_by_wire: dict[str, int]
    mean_return_first: float  # of the first tenth that was consumed
    mean_return_last: float
    mean_staleness: float  # versions between the policy that played an episode and the one it improved
    updates: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A worker gives up."""

    kind: str  # class of the error
    message: str


Done = RolloutDone | TrainerDone
Message = Progress | RolloutDone | TrainerDone | Failed


# --- the worker's side ----------------------------------------------------------------------------------
class Parent:
    """The way to the process that started this one. One thread."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def send(self, message: Message) -> None:
        """Send a message to the parent; dropped where the parent has ended."""
        try:
            self._out.write(msgspec.json.encode(message) + b"\n")
            self._out.flush()
        except BrokenPipeError:
            log.debug("the parent closed the pipe; its messages are dropped")

    def wants_stop(self) -> bool:
        """Whether to stop: the parent closed the pipe or died, or a signal came."""
        return self._input_ended(0.0)

    def wait_for_stop(self) -> None:
        """Until `wants_stop`."""
        while not self._input_ended(None):
            pass

    def _input_ended(self, timeout_s: float | None) -> bool:
        # Nothing follows the configuration, so what can be read is the end.
        return bool(select.select([_STDIN], [], [], timeout_s)[0])


def run(work: Callable[[WorkerConfig, Parent], None]) -> int:
    """Do a worker's work from beginning to end; returns the exit status."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    name = f"{work.__name__} {config.index}"
    logging.basicConfig(level="WARNING", format=f"{name}: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_input)
    parent = Parent(_private_stdout())
    try:
        work(config, parent)
    except TransportError as error:
        if not parent.wants_stop():  # otherwise it is what stopping has caused
            parent.send(Failed(kind=type(error).__name__, message=str(error)))
        return 1
    finally:
        if os.getppid() != config.parent:
            shutil.rmtree(config.directory, ignore_errors=True)
    return 0


def tracing(config: WorkerConfig, stack: contextlib.ExitStack, kind: str) -> Trace | None:
    """Where the phases of this worker's reads and writes go, until the stack unwinds; None: not requested."""
    return stack.enter_context(Trace(config.trace, f"{kind} {config.index}")) if config.trace else None


def _end_input(*_: object) -> None:
    """Signal handler: from now on standard input is at its end, also for a wait that is under way."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, _STDIN)
    os.close(empty)


def _private_stdout() -> BinaryIO:
    """Standard output for messages only: what libraries print there (UCX does) goes to standard error from now on."""
    out = os.fdopen(os.dup(_STDOUT), "wb")
    os.dup2(_STDERR, _STDOUT)
    return out
