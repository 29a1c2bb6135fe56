"""Imported by every Python process of a soak with fault points: puts the test build of the native modules in place of
the installed ones, and sets this process's trap: one named step at which it dies or stops, on its n-th passing.

What is armed follows from SOAK_POINTS (see `points.Points`). Steps of the queue are marked here, around the
methods whose beginning and end they are; those of ring, listener and client are compiled in (native/fault.hpp).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_TOLD = os.environ.get("SOAK_POINTS")
_NATIVE = ("transport._native", "transport._ucp")

# By role; those of which a process has never heard are never passed, and cost nothing.
_ATTACHING = ("attach.found", "attach.locked", "attach.claimed")
_FREEING = ("free.unhinted", "free.unannounced", "event.advanced")
_READING = ("pin.pinned", "unpin.unpinned", "consume.consumed", "mark_consumed.marked", *_FREEING)
_RECLAIMING = ("reclaim.proven", "reclaim.cleared", "reclaim.vacated")
_BOARD = ("board.locked", "board.written")
_ASKING = ("queue.asked", "queue.changed", "queue.committed")
POINTS: dict[str, tuple[tuple[str, int], ...]] = {
    role: tuple((point, most) for points, most in groups for point in points)
    for role, groups in {
        "writer": (
            (("create.opened", "create.locked", "create.allocated", "create.header", "create.initialised"), 1),
            (("create.found", *_ATTACHING, *_BOARD, "close.released", *_RECLAIMING), 2),
            (("take.hinted", "take.taken", "publish.written", "publish.published"), 3000),
            (("take.taken", "publish.written", "publish.published"), 300),
            (("discard.discarded", "abort.freed", *_FREEING), 10),
            (_ASKING, 300),
        ),
        "supervisor": ((_BOARD, 2), (_RECLAIMING, 3), (_FREEING, 20)),
        "listener": (
            ((*_ATTACHING, *_BOARD, *_RECLAIMING), 2),
            (("unpin.unpinned", "consume.consumed", "close.released"), 50),
            (_READING, 2000),
            (("serve.asked", "serve.answered", "serve.sending", "serve.sent", "serve.acknowledging"), 300),
        ),
        "trainer": (
            ((*_ATTACHING, "close.released"), 2),
            (_READING, 1000),
            (("read.asked", "read.answered", "read.arrived"), 200),
            (_ASKING, 100),
            (("settle.asked",) * 8, 50),
            (("settle.accepted", "settle.told"), 20),
        ),
    }.items()
}


class _Trap:
    """The one point of this process, if it has any."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.folder = Path(told["folder"])
        words = [Path(word).name for word in sys.orig_argv]
        roles = {
            "transport.supervisor": "supervisor",
            "transport.listener_process": "listener",
            "writer.py": "writer",
            "trainer.py": "trainer",
        }
        self.role = next((roles[word] for word in words if word in roles), "")
        rng = random.Random(f"{told['seed']} {os.getpid()}")
        self.point, self.after, self.signal = "", 0, signal.SIGKILL
        self._lock = threading.Lock()
        if self.role and rng.random() < told["share"] and not (self.folder / "points.off").exists():
            self.point, most = rng.choice(POINTS[self.role])
            self.after = int(most ** rng.random()) - 1
            # one that stops here has payloads in hand, whose claims run out: fencing is what is to be seen then
            stops = 0.7 if self.point == "settle.asked" else 0.15
            self.signal = signal.SIGSTOP if rng.random() < stops else signal.SIGKILL
            self.descriptor = os.open(self.folder / "points", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def arm(self, module: ModuleType) -> None:
        """Of a native module."""
        if self.point in module.FAULT_POINTS:
            module.report_faults(self.descriptor)
            module.set_fault(self.point, self.signal, self.after)

    def passing(self, point: str) -> None:
        """A step in Python."""
        if not point or point != self.point:
            return
        with self._lock:
            self.after -= 1
            if self.after != -1:
                return
        os.write(self.descriptor, f"{os.getpid()} {point} {int(self.signal)}\n".encode())
        os.kill(os.getpid(), self.signal)


def _around(trap: _Trap, method: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    def marked(*arguments: Any, **named: Any) -> Any:
        trap.passing(before)
        result = method(*arguments, **named)
        trap.passing(after)
        return result

    return marked


def _mark_queue(trap: _Trap, module: ModuleType) -> None:
    queue = module.SQLiteQueue
    for name in ("publish", "known", "_try_claim", "renew", "ack_many", "retry"):
        setattr(queue, name, _around(trap, getattr(queue, name), "queue.asked", "queue.committed"))


def _mark_database(trap: _Trap, module: ModuleType) -> None:
    original = module.Database.transaction

    @contextlib.contextmanager
    def transaction(self: Any) -> Iterator[Any]:
        with original(self) as connection:
            yield connection
            trap.passing("queue.changed")  # and not committed

    module.Database.transaction = transaction


def _mark_session(trap: _Trap, module: ModuleType) -> None:
    book = module.ClaimBook
    book.settle = _around(trap, book.settle, "settle.asked", "settle.accepted")  # the queue knows, no ring does
    session = module.PackerSession
    session.settle = _around(trap, session.settle, "", "settle.told")  # rings are told, or will be


class _Finder(importlib.abc.MetaPathFinder):
    """Before all others: native modules of the test build; marks around what is pure Python."""

    def __init__(self, trap: _Trap, build: Path) -> None:
        self._build = build
        self._changes: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(_NATIVE, trap.arm)
        self._changes["transport.queue.database"] = lambda module: _mark_database(trap, module)
        self._changes["transport.queue.sqlite"] = lambda module: _mark_queue(trap, module)
        self._changes["transport.packer_session"] = lambda module: _mark_session(trap, module)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of what is changed; None leaves the module to the usual finders."""
        change = self._changes.pop(name, None)
        if change is None:
            return None
        if name in _NATIVE:
            (file,) = (self._build / "transport").glob(f"{name.rpartition('.')[2]}.*.so")
            spec = importlib.util.spec_from_file_location(name, file)
        else:
            spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is not where it should be")
        spec.loader = _Changing(spec.loader, change)
        return spec


class _Changing(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, change: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader does that is wrapped."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As well, and then the change."""
        self._loader.exec_module(module)
        self._change(module)


if _TOLD:
    _options = json.loads(_TOLD)
    sys.meta_path.insert(0, _Finder(_Trap(_options), Path(_options["build"])))
