"""CuPy's interface over host memory, as far as the transport uses it, with streams that run late.

Nothing that is queued on a stream happens until somebody waits for it, or asks whether it has happened (each question
lets the stream do one thing more). Copies read pinned and registered memory when they run, and any other memory when
they are queued, as CUDA does. So memory given away too early, and work that nothing orders, show as wrong bytes.

A host may have several devices. Each thread has a current one; handle 0 names the default stream of that one, and
handle 2 that of the thread that uses it; an event of one device is not recorded on a stream of another.

A stream that was made is destroyed with its object: what it has in its queue still runs, its handle is an error, and
the next stream that is made gets that handle.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

PER_THREAD = 2  # cudaStreamPerThread
Queue = list[Callable[[], bool]]  # each says whether it is done


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of CUDA's."""


class Event:
    """A place in a stream's queue."""

    def __init__(self, *, disable_timing: bool) -> None:
        self.cuda: FakeCuda
        self.ptr = 0
        self.device = 0
        self.place = SimpleNamespace(queue=[], reached=True)  # where it was recorded last

    @property
    def done(self) -> bool:
        """Whether the stream has got here; it goes on by one thing where not."""
        self.cuda.questions += 1
        if not self.place.reached and not self.cuda.stopped:
            self.cuda.advance(self.place.queue)
        return bool(self.place.reached)

    def synchronize(self) -> None:
        """Run the stream up to here."""
        self.cuda.waits += 1
        while not self.place.reached:
            self.cuda.advance(self.place.queue)


class Stream:
    """A queue of callables. As in CuPy those with the same handle are equal."""

    def __init__(self, cuda: FakeCuda, ptr: int, device_id: int = -1) -> None:
        self._cuda = cuda
        self.ptr = ptr
        self.device_id = device_id  # -1 for a default stream

    def __del__(self) -> None:
        if self.device_id >= 0:
            self._cuda.destroy(self.ptr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def synchronize(self) -> None:
        """Run all that is queued."""
        self._cuda.stream_synchronize(self.ptr)

    def __enter__(self) -> Stream:
        device = self._cuda.device_for(self)
        self._cuda.entered.setdefault(threading.get_ident(), []).append((device, self))
        return self.use()

    def __exit__(self, *_: object) -> None:
        """The stream entered before is the current one again; as in CuPy, not one that `use` made so."""
        thread = threading.get_ident()
        entered = self._cuda.entered[thread]
        device, _ = entered.pop()
        before = [stream for its_device, stream in entered if its_device == device]
        self._cuda.current.pop((thread, device))
        if before:
            self._cuda.current[thread, device] = before[-1]

    def use(self) -> Stream:
        """Make it the current one of its device."""
        self._cuda.current[threading.get_ident(), self._cuda.device_for(self)] = self
        return self


class FakeCuda:
    """The devices: their streams, their memory, and what was asked of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        # By handle; the default streams are 0 of the first device, -1 of the second, and so on.
        self.queues: dict[int, Queue] = {-device: [] for device in range(count)}
        self._ended: list[Queue] = []  # of destroyed streams
        self._free: list[int] = []  # their handles
        self.device_of = {-device: device for device in range(count)}
        self.entered: dict[int, list[tuple[int, Stream]]] = {}  # by thread, with its device
        self.current: dict[tuple[int, int], Stream] = {}  # by thread and device
        self.current_device: dict[int, list[int]] = {}
        # By handle; CUDA's event ends when the collector or its last user ends the object, also if it is found again.
        self.events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self.registered: dict[int, int] = {}  # size by address: registered or pinned
        self.read_only: set[int] = set()
        self.copies: list[tuple[str, int, int]] = []  # kind, bytes, stream
        self.questions = 0
        self.waits = 0
        # Memory of arrays that are gone goes back to a pool; what is queued may still write to it.
        self.memory: list[np.ndarray] = []
        self.pooled_in_use = 0
        self.pinned_on: list[int] = []  # the device that was current, for each block
        self.per_thread = False  # every thread has a default stream of its own
        self._of_thread = threading.local()  # not by the thread's number, which a later thread may have
        self.stopped = False  # streams run only when somebody waits
        self.refuses_registration = False
        self.copies_left = self.marks_left = 1 << 62  # before every further one fails
        self._numbers = itertools.count(1)
        self._stepping = threading.RLock()

    @property
    def device(self) -> int:
        """The one that is current in this thread."""
        return (self.current_device.get(threading.get_ident()) or [0])[-1]

    def named(self, stream: int) -> int:
        """The queue that a handle names here and now."""
        if stream == PER_THREAD:
            mine = vars(self._of_thread)
            if self.device not in mine:
                mine[self.device] = self._new_queue()
            return int(mine[self.device])
        if stream and stream not in self.queues:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        return stream or -self.device

    def new_stream(self) -> Stream:
        return Stream(self, self._new_queue(), self.device)

    def _new_queue(self) -> int:
        ptr = self._free.pop() if self._free else next(self._numbers) << 8
        self.queues[ptr] = []
        self.device_of[ptr] = self.device
        return ptr

    def destroy(self, ptr: int) -> None:
        """End a stream, which does what is in its queue all the same."""
        self._ended.append(self.queues.pop(ptr))
        self._free.append(ptr)

    def current_stream(self, device: int | None = None) -> Stream:
        """Of a device, by default the current one."""
        wanted = self.device if device is None else device
        default = Stream(self, PER_THREAD if self.per_thread else 0)
        return self.current.get((threading.get_ident(), wanted), default)

    def device_for(self, stream: Stream) -> int:
        """The device that a stream is of; a default stream is of the current one."""
        return self.device if stream.device_id < 0 else stream.device_id

    def queue(self, work: Callable[[], object], stream: int | None = None) -> None:
        """Queue work on a stream, by default the current one."""

        def always() -> bool:
            work()
            return True

        self.queues[self.named(self.current_stream().ptr if stream is None else stream)].append(always)

    def step(self, stream: int) -> None:
        """Let a stream do one thing, or what it waits for."""
        self.advance(self.queues[stream])

    def advance(self, queue: Queue) -> None:
        """`step`, for a stream that may be destroyed."""
        with self._stepping:  # a test drives streams while a thread of the package waits for one of their events
            if queue and queue[0]():
                queue.pop(0)

    def run_all(self) -> None:
        """Let every stream do everything."""
        while any(queues := [*self.queues.values(), *self._ended]):
            for queue in queues:
                self.advance(queue)

    def end(self) -> None:
        """Forget what is queued, then the memory."""
        for queue in [*self.queues.values(), *self._ended]:
            queue.clear()
        self.memory.clear()

    # --- the runtime ------------------------------------------------------------------------------
    def memcpy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.copies_left -= 1
        if self.copies_left < 0:
            raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        self.copies.append(({1: "h2d", 2: "d2h"}[kind], size, stream))
        stream = self.named(stream)
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
        self.marks_left -= 1
        if self.marks_left < 0:
            raise CUDARuntimeError("cudaErrorLaunchFailure: unspecified launch failure")
        recorded, stream = self.events[event], self.named(stream)
        if recorded.device != self.device_of[stream]:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        # An event that is recorded again is another place: what waits for the one before still does.
        recorded.place = place = SimpleNamespace(queue=self.queues[stream], reached=False)
        self.queue(lambda: setattr(place, "reached", True), stream)

    def stream_wait_event(self, stream: int, event: int, _: int) -> None:
        place = self.events[event].place

        def wait() -> bool:
            if not place.reached:
                self.advance(place.queue)
            return bool(place.reached)

        self.queues[self.named(stream)].append(wait)

    def stream_synchronize(self, stream: int) -> None:
        self.waits += 1
        while self.queues[self.named(stream)]:
            self.step(self.named(stream))

    def device_synchronize(self) -> None:
        """Waits for the other devices too, which a program cannot tell from a slow device."""
        self.waits += 1
        self.run_all()

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
        event.cuda, event.ptr, event.device = self, next(self._numbers), self.device
        self.events[event.ptr] = event
        return event

    def pinned(self, size: int) -> SimpleNamespace:
        memory = np.zeros(size, np.uint8)
        self.pinned_on.append(self.device)
        self.registered[memory.ctypes.data] = size
        return SimpleNamespace(memory=memory)

    def pooled(self, size: int) -> Any:
        """Pinned memory of a pool: what nobody has any more is overwritten, as if it were lent again."""
        memory = self.pinned(size).memory
        self.memory.append(memory)
        lent = (ctypes.c_ubyte * size).from_buffer(memory)
        self.pooled_in_use += 1

        def back() -> None:
            memory[:] = 0xDD
            self.pooled_in_use -= 1

        weakref.finalize(lent, back).atexit = False
        return lent


def fake_cupy(count: int = 1) -> Any:
    """A module to stand for cupy; `cupy.fake` is its ``count`` devices."""
    cuda = FakeCuda(count)
    module: Any = ModuleType("cupy")
    module.fake = cuda

    class Array:
        """An array in "device" memory, which is the host's and not to be looked at before its stream has run."""

        def __init__(self, host: np.ndarray, device: int | None = None) -> None:
            self.host = host
            cuda.memory.append(host)
            self.device = SimpleNamespace(id=cuda.device if device is None else device)

        data = property(lambda self: SimpleNamespace(ptr=self.host.ctypes.data, device_id=self.device.id))
        dtype = property(lambda self: self.host.dtype)
        shape = property(lambda self: self.host.shape)
        nbytes = property(lambda self: self.host.nbytes)
        flags = property(lambda self: SimpleNamespace(c_contiguous=self.host.flags.c_contiguous))

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {**self.host.__array_interface__, "version": 3}

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, self.device.id

        def __getitem__(self, key: Any) -> Array:
            return Array(self.host[key], self.device.id)

        def reshape(self, *shape: Any) -> Array:
            return Array(self.host.reshape(*shape), self.device.id)

        def view(self, dtype: Any) -> Array:
            if np.dtype(dtype).name.startswith("float8"):
                raise ValueError(f"Unsupported dtype {dtype}")
            return Array(self.host.view(dtype), self.device.id)

        def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> Array:
            if np.dtype(dtype).name.startswith("float8"):
                raise ValueError(f"Unsupported dtype {dtype}")
            assert cuda.device == self.device.id, "a kernel runs on its stream's device, which is the current one's"
            made = np.zeros(self.host.shape, dtype)
            cuda.queue(lambda: np.copyto(made, self.host, casting="unsafe"))
            return Array(host=made)

    def asnumpy(array: Array) -> np.ndarray:
        cuda.run_all()
        return array.host.copy()

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
    module.asarray, module.asnumpy, module.on_device = asarray, asnumpy, on_device

    class Device:
        """A device, and the context in which it is the current one."""

        def __init__(self, number: int | None = None) -> None:
            self.id = cuda.device if number is None else number

        def __enter__(self) -> None:
            if not 0 <= self.id < cuda.count:
                raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
            cuda.current_device.setdefault(threading.get_ident(), []).append(self.id)

        def __exit__(self, *_: object) -> None:
            cuda.current_device[threading.get_ident()].pop()

        synchronize = staticmethod(cuda.device_synchronize)

    class Streams:
        """CuPy's class of streams."""

        def __new__(cls, **_: Any) -> Any:
            return cuda.new_stream()

    module.cuda = SimpleNamespace(
        Device=Device,
        Stream=Streams,
        Event=cuda.new_event,
        get_current_stream=cuda.current_stream,
        PinnedMemory=cuda.pinned,
        PinnedMemoryPointer=lambda pinned, offset: pinned.memory,
        alloc_pinned_memory=cuda.pooled,
        runtime=SimpleNamespace(
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyAsync=cuda.memcpy,
            eventRecord=cuda.event_record,
            streamWaitEvent=cuda.stream_wait_event,
            streamSynchronize=cuda.stream_synchronize,
            hostRegister=cuda.host_register,
            hostUnregister=cuda.host_unregister,
            getDeviceCount=lambda: cuda.count,
            CUDARuntimeError=CUDARuntimeError,
        ),
    )
    return module
