"""CuPy's interface over host memory, as far as the transport uses it, with streams that run late.

Nothing that is queued on a stream happens until somebody waits for it, or asks whether it has happened (each question
lets the stream do one thing more). Copies read pinned and registered memory when they run, and any other memory when
they are queued, as CUDA does. So memory given away too early, and work that nothing orders, show as wrong bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of CUDA's."""


class Event:
    """A place in a stream's queue."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.cuda: FakeCuda
        self.ptr = 0
        self.stream: int | None = None
        self.reached = True

    @property
    def done(self) -> bool:
        """Whether the stream has got here; it goes on by one thing where not."""
        self.cuda.questions += 1
        if not self.reached and not self.cuda.stopped:
            self.cuda.step(self.stream)
        return self.reached

    def synchronize(self) -> None:
        """Run the stream up to here."""
        self.cuda.waits += 1
        while not self.reached:
            self.cuda.step(self.stream)


class Stream:
    """A queue of callables, which ends with the object that made it."""

    def __init__(self, cuda: FakeCuda, ptr: int, *, own: bool = False) -> None:
        self._cuda = cuda
        self.ptr = ptr
        self._own = own

    def __del__(self) -> None:
        if self._own:
            while self._cuda.queues[self.ptr]:
                self._cuda.step(self.ptr)
            del self._cuda.queues[self.ptr]

    def __enter__(self) -> Stream:
        self._cuda.current.setdefault(threading.get_ident(), []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._cuda.current[threading.get_ident()].pop()


class FakeCuda:
    """One device: its streams, its memory, and what was asked of it."""

    def __init__(self) -> None:
        self.queues: dict[int, list[Callable[[], bool]]] = {0: []}
        self.current: dict[int, list[Stream]] = {}
        self.events: dict[int, Event] = {}
        self.registered: dict[int, int] = {}  # size by address: registered or pinned
        self.read_only: set[int] = set()
        self.copies: list[tuple[str, int, int]] = []  # kind, bytes, stream
        self.questions = 0
        self.waits = 0
        self.stopped = False  # streams run only when somebody waits
        self.refuses_registration = False
        self.copies_left = 1 << 62  # before every further one fails
        self._numbers = itertools.count(1)

    def new_stream(self) -> Stream:
        ptr = next(self._numbers) << 8
        self.queues[ptr] = []
        return Stream(self, ptr, own=True)

    def current_stream(self) -> Stream:
        return (self.current.get(threading.get_ident()) or [Stream(self, 0)])[-1]

    def queue(self, work: Callable[[], object], stream: int | None = None) -> None:
        """Queue work on a stream, by default the current one."""

        def always() -> bool:
            work()
            return True

        self.queues[self.current_stream().ptr if stream is None else stream].append(always)

    def step(self, stream: int | None) -> None:
        """Let a stream do one thing, or what it waits for."""
        assert stream is not None
        queue = self.queues[stream]
        if queue and queue[0]():
            queue.pop(0)

    def run_all(self) -> None:
        """Let every stream do everything."""
        while any(self.queues.values()):
            for stream, queue in self.queues.items():
                if queue:
                    self.step(stream)

    # --- the runtime ------------------------------------------------------------------------------
    def memcpy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.copies_left -= 1
        if self.copies_left < 0:
            raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        self.copies.append(({1: "h2d", 2: "d2h"}[kind], size, stream))
        host = source if kind == 1 else target
        if not any(base <= host and host + size <= base + length for base, length in self.registered.items()):
            if kind == 2:
                while self.queues[stream]:
                    self.step(stream)
                ctypes.memmove(target, source, size)
                return
            read = ctypes.string_at(source, size)
            self.queue(lambda: ctypes.memmove(target, read, size), stream)
            return
        self.queue(lambda: ctypes.memmove(target, source, size), stream)

    def event_record(self, event: int, stream: int) -> None:
        recorded = self.events[event]
        recorded.stream, recorded.reached = stream, False
        self.queue(lambda: setattr(recorded, "reached", True), stream)

    def stream_wait_event(self, stream: int, event: int, _: int) -> None:
        awaited = self.events[event]

        def wait() -> bool:
            if not awaited.reached:
                self.step(awaited.stream)
            return awaited.reached

        self.queues[stream].append(wait)

    def host_register(self, address: int, size: int, flags: int) -> None:
        if self.refuses_registration:
            raise CUDARuntimeError("cudaErrorNotSupported: operation not supported")
        assert all(address + size <= base or base + length <= address for base, length in self.registered.items())
        self.registered[address] = size
        if flags & 8:
            self.read_only.add(address)

    def host_unregister(self, address: int) -> None:
        if address not in self.registered:
            raise CUDARuntimeError("cudaErrorHostMemoryNotRegistered")
        del self.registered[address]

    def new_event(self, **options: Any) -> Event:
        event = Event(**options)
        event.cuda, event.ptr = self, next(self._numbers)
        self.events[event.ptr] = event
        return event

    def pinned(self, size: int) -> SimpleNamespace:
        memory = np.zeros(size, np.uint8)
        self.registered[memory.ctypes.data] = size
        return SimpleNamespace(memory=memory)


class _Current:
    def __init__(self, device: int) -> None:
        self.id = device

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def fake_cupy() -> Any:
    """A module to stand for cupy; `cupy.fake` is the device."""
    cuda = FakeCuda()
    module: Any = ModuleType("cupy")
    module.fake = cuda

    class Array:
        """An array in "device" memory, which is the host's and not to be looked at before its stream has run."""

        def __init__(self, host: np.ndarray) -> None:
            self.host = host
            self.device = SimpleNamespace(id=0)

        data = property(lambda self: SimpleNamespace(ptr=self.host.ctypes.data, device_id=0))
        dtype = property(lambda self: self.host.dtype)
        shape = property(lambda self: self.host.shape)
        size = property(lambda self: self.host.size)
        nbytes = property(lambda self: self.host.nbytes)
        flags = property(lambda self: SimpleNamespace(c_contiguous=self.host.flags.c_contiguous))

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {**self.host.__array_interface__, "version": 3}

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __getitem__(self, key: Any) -> Array:
            return Array(host=self.host[key])

        def reshape(self, *shape: Any) -> Array:
            return Array(host=self.host.reshape(*shape))

        def view(self, dtype: Any) -> Array:
            if np.dtype(dtype).name.startswith("float8"):
                raise ValueError(f"Unsupported dtype {dtype}")
            return Array(host=self.host.view(dtype))

        def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> Array:
            if np.dtype(dtype).name.startswith("float8"):
                raise ValueError(f"Unsupported dtype {dtype}")
            made = np.zeros(self.host.shape, dtype)
            cuda.queue(lambda: np.copyto(made, self.host, casting="unsafe"))
            return Array(host=made)

    def asnumpy(array: Array) -> np.ndarray:
        cuda.run_all()
        return array.host.copy()

    def raw_kernel(_: str, name: str) -> Any:
        """The one kernel that the transport has, in Python."""
        assert name == "gather"

        def launch(grid: tuple[int], _: tuple[int], arguments: tuple[Array, Array]) -> None:
            parts, out = (array.host for array in arguments)

            def gather() -> None:
                for source, place, size in parts.reshape(grid[0], 3).tolist():
                    out[place : place + size] = np.frombuffer(ctypes.string_at(source, size), np.uint8)

            cuda.queue(gather)

        return launch

    def asarray(values: Any) -> Array:
        return Array(host=np.array(values))

    def on_device(values: Any) -> Array:
        """Values as a kernel writes them: there once the current stream has run."""
        values = np.array(values)
        made = Array(host=np.zeros_like(values))
        cuda.queue(lambda: np.copyto(made.host, values))
        return made

    module.ndarray = Array
    module.empty = lambda shape, dtype: Array(host=np.full(shape, 0xEE, dtype))
    module.zeros = lambda shape, dtype: Array(host=np.zeros(shape, dtype))
    module.asarray, module.asnumpy, module.RawKernel, module.on_device = asarray, asnumpy, raw_kernel, on_device

    class Streams:
        """CuPy's class of streams."""

        def __new__(cls, **_: Any) -> Any:
            return cuda.new_stream()

        @staticmethod
        def from_external(stream: Any) -> Stream:
            return Stream(cuda, stream.__cuda_stream__()[1])

    module.cuda = SimpleNamespace(
        Device=_Current,
        Stream=Streams,
        Event=cuda.new_event,
        get_current_stream=lambda device: cuda.current_stream(),
        PinnedMemory=cuda.pinned,
        PinnedMemoryPointer=lambda pinned, offset: pinned.memory,
        runtime=SimpleNamespace(
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyAsync=cuda.memcpy,
            eventRecord=cuda.event_record,
            streamWaitEvent=cuda.stream_wait_event,
            hostRegister=cuda.host_register,
            hostUnregister=cuda.host_unregister,
            getDeviceCount=lambda: 1,
            CUDARuntimeError=CUDARuntimeError,
        ),
    )
    return module
