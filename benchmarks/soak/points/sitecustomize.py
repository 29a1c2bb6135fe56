"""Imported by every Python process of a soak: puts the test build of the native modules, if there is one, in place of
the installed ones, and sets this process's trap: one named step at which it dies or stops, on its n-th passing.
Besides, whoever comes first to a step that the soak has named (`fault_injection.Points.stop_at`) stops there.

What is armed follows from SOAK_POINTS (`run.Soak`). Steps in Python are marked here, around the methods whose
beginning and end they are; those of ring, listener and client are compiled in (native/common/fault.hpp). A planted
fault (`planted.py`) goes into the modules that it names the same way.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_TOLD = os.environ.get("SOAK_POINTS")
_NATIVE = ("transport._ring", "transport._ucp")

# By role; those of which a process has never heard are never passed, and cost nothing.
_ATTACHING = ("attach.found", "attach.locked", "attach.claimed")
_FREEING = ("free.unhinted", "free.unannounced", "event.advanced")
_READING = ("pin.pinned", "unpin.unpinned", "consume.consumed", "mark_consumed.marked", *_FREEING)
_RECLAIMING = ("reclaim.proven", "reclaim.cleared", "reclaim.vacated")
_BOARD = ("board.locked", "board.written")
_ASKING = ("queue.asked", "queue.answered")
_CLAIMING = ("claim.pinned", "claim.claimed", "claim.withdrawn")
_RETURNING = ("give_back.dropped", "return.unhinted", "return.unannounced")


def _flat(groups: Any) -> tuple[tuple[str, int], ...]:
    return tuple((point, most) for points, most in groups for point in points)


# Besides: claims, demands and the ends of both.
OF_RINGS: dict[str, tuple[tuple[str, int], ...]] = {
    role: _flat(groups)
    for role, groups in {
        "writer": (((*_RETURNING, "reclaim.disclaimed"), 5), (("failure.counted",), 5)),
        "supervisor": (((*_RETURNING, "reclaim.disclaimed"), 5),),
        "listener": (
            (("demand.waits", "demand.claimed", "demand.answered"), 200),
            (("demand.claimed", "demand.answered", "finish.asked", "outcome.noted", "outcome.decided"), 50),
            (("finish.asked", "outcome.noted", "outcome.decided"), 2000),
            (_CLAIMING, 2000),
            (("taker.building",), 3),
            ((*_RETURNING, "reclaim.disclaimed", "failure.counted"), 10),
        ),
        "trainer": (
            (_CLAIMING, 1000),
            (_RETURNING, 20),
            (("reclaim.disclaimed", "failure.counted"), 5),
            (("ends.sent",) * 4, 50),
        ),
    }.items()
}
POINTS: dict[str, tuple[tuple[str, int], ...]] = {
    role: _flat(groups)
    for role, groups in {
        "writer": (
            (("create.opened", "create.locked", "create.allocated", "create.header", "create.initialised"), 1),
            (("create.found", *_ATTACHING, *_BOARD, "close.released", *_RECLAIMING), 2),
            (("take.hinted", "take.taken", "publish.written", "publish.published"), 3000),
            (("take.taken", "publish.written", "publish.published"), 300),
            (("discard.discarded", "abort.freed", *_FREEING), 10),
        ),
        "supervisor": ((_BOARD, 2), (_RECLAIMING, 3), (_FREEING, 20), (("unlink.checked",), 1)),
        "listener": (
            ((*_ATTACHING, *_BOARD, *_RECLAIMING, "unlink.checked"), 2),
            (("unpin.unpinned", "consume.consumed", "close.released"), 50),
            (_READING, 2000),
            (("serve.asked", "serve.answered", "serve.sending", "serve.sent", "serve.acknowledging"), 300),
        ),
        "trainer": (
            ((*_ATTACHING, "close.released", "unlink.checked"), 2),
            (_READING, 1000),
            (("read.asked", "read.answered", "read.arrived"), 200),
            (_ASKING, 100),
            (("settle.asked",) * 8, 50),
            (("claim.taken",) * 2, 50),
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
            "transport.server.supervisor": "supervisor",
            "transport.server.process": "listener",
            "rollout.py": "writer",
            "trainer.py": "trainer",
        }
        self.role = next((roles[word] for word in words if word in roles), "")
        rng = random.Random(f"{told['seed']} {os.getpid()}")
        self.point, self.after, self.signal = "", 0, signal.SIGKILL
        self._lock = threading.Lock()
        if self.role and rng.random() < told["share"] and not (self.folder / "points.off").exists():
            points = POINTS[self.role] + OF_RINGS[self.role]
            self.point, most = rng.choice(points)
            self.after = int(most ** rng.random()) - 1
            # one that stops here has payloads in hand, whose claims run out: fencing is what is to be seen then
            stops = 0.7 if self.point in ("settle.asked", "claim.taken") else 0.15
            self.signal = signal.SIGSTOP if rng.random() < stops else signal.SIGKILL
        self.descriptor = os.open(self.folder / "points", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def arm(self, module: ModuleType) -> None:
        """Of a native module."""
        if self.point in getattr(module, "FAULT_POINTS", ()):  # the installed ones have none
            module.report_faults(self.descriptor)
            module.set_fault(self.point, self.signal, self.after)

    def passing(self, point: str) -> None:
        """A step in Python."""
        if not point:
            return
        with contextlib.suppress(OSError):
            (self.folder / f"stop.{point}").unlink()
            self._close(point, signal.SIGSTOP)
        if point != self.point:
            return
        with self._lock:
            self.after -= 1
            if self.after != -1:
                return
        self._close(point, self.signal)

    def _close(self, point: str, number: int) -> None:
        os.write(self.descriptor, f"{os.getpid()} {point} {int(number)}\n".encode())
        os.kill(os.getpid(), number)


def _around(trap: _Trap, method: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    def marked(*arguments: Any, **named: Any) -> Any:
        trap.passing(before)
        result = method(*arguments, **named)
        trap.passing(after)
        return result

    return marked


def _mark(trap: _Trap, module: ModuleType) -> None:
    rings: Any = module.FoundRings
    rings.take_parts = _around(trap, rings.take_parts, "rings.asked", "claim.taken")  # no batch is made yet


def _mark_batch(trap: _Trap, module: ModuleType) -> None:
    batch: Any = module.Batch
    batch.consume = _around(trap, batch.consume, "settle.asked", "settle.told")  # rings are told, or will be


def _mark_ends(trap: _Trap, module: ModuleType) -> None:
    connection = module.ClaimConnection
    connection._message = _around(trap, connection._message, "", "ends.sent")  # to a listener, which has not answered


def _planted(name: str) -> dict[str, Callable[[ModuleType], None]]:
    """What a planted fault changes, by module."""
    if not name:
        return {}
    # By its place: what a process may import stays as it is.
    spec = importlib.util.spec_from_file_location("planted", Path(__file__).parent.parent / "planted.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["planted"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["planted"])
    changes: dict[str, Callable[[ModuleType], None]] = sys.modules["planted"].PLANTS[name].changes
    return changes


CHANGES: dict[str, Callable[[_Trap, ModuleType], None]] = {
    **dict.fromkeys(_NATIVE, _Trap.arm),
    "transport.claims.rings": _mark,
    "transport.claims.connection": _mark_ends,
    "transport.training.batch": _mark_batch,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Before all others: native modules of the test build; marks around what is pure Python; the planted fault."""

    def __init__(self, trap: _Trap, build: Path | None, plant: str) -> None:
        self._build = build
        self._changes: dict[str, list[Callable[[ModuleType], None]]] = {
            name: [functools.partial(change, trap)] for name, change in CHANGES.items()
        }
        for name, change in _planted(plant).items():
            self._changes.setdefault(name, []).insert(0, change)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of what is changed; None leaves the module to the usual finders."""
        changes = self._changes.pop(name, None)
        if changes is None:
            return None
        if name in _NATIVE and self._build is not None:
            (file,) = (self._build / "transport").glob(f"{name.rpartition('.')[2]}.*.so")
            spec = importlib.util.spec_from_file_location(name, file)
        else:
            spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is missing in the test build")
        spec.loader = _Changing(spec.loader, changes)
        return spec


class _Changing(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, changes: list[Callable[[ModuleType], None]]) -> None:
        self._loader = loader
        self._changes = changes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader does that is wrapped."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As well, and then the changes."""
        self._loader.exec_module(module)
        for change in self._changes:
            try:
                change(module)
            except AttributeError as error:  # an import inside `__getattr__` would pass over it
                raise RuntimeError(f"{module.__name__} has other names than this soak changes") from error


if _TOLD:
    _options = json.loads(_TOLD)
    _build = _options["build"] and Path(_options["build"])
    sys.meta_path.insert(0, _Finder(_Trap(_options), _build, _options["plant"]))
