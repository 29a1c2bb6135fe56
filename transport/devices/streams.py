"""CUDA through CuPy: copies on streams, marks in a stream's queue, host memory registered or pinned.

The calls take CUDA's handle of a stream, an integer; 0 is the default stream of the device that a call names. What
outlives a call keeps a `Stream`. Copies are queued, not waited for: a `Mark` after a copy tells when it is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from transport.devices.arrays import require_cupy
from transport.errors import MissingDependencyError

log = logging.getLogger(__name__)

PER_THREAD = 2  # cudaStreamPerThread: the default stream of the calling thread

_READ_ONLY = 8  # cudaHostRegisterReadOnly, which CuPy does not name


class Stream(NamedTuple):
    """A stream, with the object that keeps it alive: CuPy destroys both together, and CUDA gives the handle out again.

    So this is what is kept; the handle alone is only the argument of a call.
    """

    handle: int
    owner: Any  # CuPy's or torch's object


def require_device() -> int:
    """Return the number of CUDA devices. MissingDependencyError, with the reason: there is none, or no CuPy."""
    runtime = require_cupy().cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise MissingDependencyError(f"no CUDA device: {error}") from error
    if not count:
        raise MissingDependencyError("no CUDA device")
    return count


def address_of(memory: Any) -> int:
    """Return the address of contiguous host memory, read-only memory included."""
    return int(np.asarray(memoryview(memory)).__array_interface__["data"][0])


def copy_to_host(copies: Iterable[tuple[int, int, int]], device: int, stream: int) -> None:
    """Queue copies (target, source, bytes) from device memory. Copies into unregistered memory are synchronous."""
    cupy = require_cupy()
    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(device):
        for target, source, nbytes in copies:
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToHost, stream)


def copy_to_device(target: int, source: int, nbytes: int, device: int, stream: int) -> None:
    """Queue a copy into device memory. Host memory that is not registered has been read when this returns."""
    cupy = require_cupy()
    with cupy.cuda.Device(device):
        cupy.cuda.runtime.memcpyAsync(target, source, nbytes, cupy.cuda.runtime.memcpyHostToDevice, stream)


@contextlib.contextmanager
def settled_on_failure(stream: int, device: int) -> Iterator[None]:
    """Use around code that queues copies and then a mark.

    If it fails before the mark, nothing tells when the memory is free again, so the stream is synchronised. If that
    fails too, the device has failed and copies nothing more.
    """
    try:
        yield
    except BaseException:
        cupy = require_cupy()
        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError), cupy.cuda.Device(device):
            cupy.cuda.runtime.streamSynchronize(stream)
        raise


class Mark:
    """A position in a stream's queue. When it has passed, all work queued before it is done. Any thread."""

    def __init__(self, stream: int, device: int) -> None:
        cupy = require_cupy()
        self._runtime = cupy.cuda.runtime
        with cupy.cuda.Device(device):
            # No pool that marks give events back to: where the collector ends a mark in a cycle, it ends the event as
            # well, and the pool would have one that CUDA has destroyed.
            self._event = cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(self._event.ptr, stream)

    @property
    def passed(self) -> bool:
        """True if the stream has reached it. Raises CUDA's error if the device has failed."""
        return bool(self._event.done)

    def wait(self) -> None:
        """Wait for it in this thread, without the interpreter lock; the device continues with other work."""
        self._event.synchronize()

    def hold(self, stream: int, device: int) -> None:
        """Work queued on ``stream`` of ``device`` from now on runs after this mark. The host does not wait."""
        with require_cupy().cuda.Device(device):  # selects the device of a default stream
            self._runtime.streamWaitEvent(stream, self._event.ptr, 0)


def has_passed(mark: Mark) -> bool:
    """Return whether the mark has passed; True after a device fault, too: a failed device copies nothing more."""
    try:
        return mark.passed
    except Exception as error:  # CUDA's classes belong to CuPy, which is not imported here
        log.error("a device copy failed: %s", error)
        return True


def stream_for_others(stream: Stream, device: int) -> Stream:
    """Return a stream on which other threads can queue work after this thread's current stream.

    It is the stream itself. Exception: the handle of the per-thread default stream names another stream in another
    thread; then it is the project's own stream, made to run after the work queued by now.
    """
    if stream.handle != PER_THREAD:
        return stream
    own = own_stream(device)
    Mark(stream.handle, device).hold(own.handle, device)
    return own


def own_stream(device: int) -> Stream:
    """Return the stream of our own copies on a device. It waits for no other and lives as long as the process.

    CuPy's memory pool remembers memory by the stream it was allocated for, also when that stream is gone.
    """
    return _own_stream(require_cupy(), device)


@cache
def _own_stream(cupy: Any, device: int) -> Stream:
    with cupy.cuda.Device(device):
        stream = cupy.cuda.Stream(non_blocking=True)
        return Stream(int(stream.ptr), stream)


@contextlib.contextmanager
def on_own_stream(device: int) -> Iterator[None]:
    """CuPy's work of the block goes to `own_stream`. Afterwards the caller's stream of the device is current again."""
    cupy = require_cupy()
    with cupy.cuda.Device(device):
        before = cupy.cuda.get_current_stream()
        own_stream(device).owner.use()
        try:
            yield
        finally:
            before.use()  # not by `with`, which goes back past a stream that the caller made current by use()


def pinned_memory(nbytes: int, device: int) -> np.ndarray:
    """Page-locked host memory as a uint8 array; freed with its last view. Any device may copy from and to it.

    device: used already, or about to be: a process that touches another takes hundreds of MiB of that one.
    """
    cupy = require_cupy()
    with cupy.cuda.Device(device):
        pinned = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)
    return np.frombuffer(pinned, np.uint8, nbytes)


def pooled_pinned_memory(nbytes: int, device: int) -> np.ndarray:
    """Return `pinned_memory` from CuPy's pool, to which it goes back with its last view.

    The pool does not count copies: the code that queues one keeps a view until it is done.
    """
    cupy = require_cupy()
    with cupy.cuda.Device(device):
        pinned = cupy.cuda.alloc_pinned_memory(max(1, nbytes))
    return np.frombuffer(pinned, np.uint8, nbytes)


def current_device() -> int:
    """Return the device that is current in this thread. MissingDependencyError without CuPy or a device."""
    require_device()
    return int(require_cupy().cuda.Device().id)


class QueuedCopies:
    """Host memory that queued copies read, kept until they are done. Any thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[Mark, Any]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<QueuedCopies {len(self._kept)} copies>"

    def keep(self, mark: Mark, memory: Any) -> None:
        """Keep memory until ``mark`` has passed, which is looked at with every further call."""
        with self._lock:
            self._kept = [(other, each) for other, each in self._kept if not has_passed(other)]
            self._kept.append((mark, memory))


class RegisteredPages:
    """Host memory owned by other objects, registered with CUDA piece by piece at the first use. Any thread.

    Copies from and to registered memory run at the speed of the bus and need no staging inside the driver. If CUDA
    refuses to register it, copies still work but are slower; one warning is logged.

    Args:
        read_only: the memory is mapped so.
    """

    def __init__(self, *, read_only: bool) -> None:
        self._flags = _READ_ONLY if read_only else 0
        self._pieces: dict[int, int] = {}  # address by key
        self._refused = False
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<RegisteredPages {len(self._pieces)} pieces{', refused' if self._refused else ''}>"

    def __len__(self) -> int:
        return len(self._pieces)

    def ensure(self, key: int, memory: Callable[[], Any], device: int) -> bool:
        """Register the piece named ``key``, once. False: it is not registered.

        memory: gives the piece, called only where it is new.
        """
        if key in self._pieces:
            return True
        if self._refused:
            return False
        cupy = require_cupy()
        with self._lock:
            if key in self._pieces or self._refused:
                return not self._refused
            piece = memory()
            address = address_of(piece)
            try:
                with cupy.cuda.Device(device):
                    cupy.cuda.runtime.hostRegister(address, len(piece), self._flags)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                self._refused = True
                log.warning(
                    "CUDA cannot register shared memory (%s); the driver copies it through a buffer of its own", error
                )
                return False
            self._pieces[key] = address
            return True

    def release(self) -> None:
        """Give every piece back, before the memory is unmapped. Copies from and to it must be done. Idempotent."""
        with self._lock:
            pieces, self._pieces = self._pieces, {}
            if not pieces or os.getpid() != self._process:  # registrations are not inherited by a forked child
                return
            runtime = require_cupy().cuda.runtime
            for address in pieces.values():
                try:
                    runtime.hostUnregister(address)
                except runtime.CUDARuntimeError as error:  # at the end of the process the driver may be gone
                    log.debug("unregistering %#x: %s", address, error)
