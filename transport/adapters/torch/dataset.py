"""Tickets in a torch training loop: batches of tensors, in the trainer's process or fetched by worker processes.

    dataset = TicketDataset("rings:run", batch_size=64, schemas=[schema], collate=pad)
    for batch in TicketLoader(dataset, num_workers=2):
        ...                    # asking for the next batch acknowledges this one

torchdata's StatefulDataLoader takes the dataset as well (``batch_size=None``), and resumes in the middle of an epoch.

A batch is acknowledged when the loop asks for the next one. If the loop ends early, its last batch is given back to the
queue, unless `consume` was called. The claims of a killed trainer return to the queue when their leases end: a batch
that it trained on without asking for the next one is trained on again, from the checkpoint it restarts with.

    trainer                                    worker process (num_workers > 0): a client of its own
    TicketLoader ◄──── batches, copied ─────── TicketDataset ──► claims, fetches, acknowledges
                 ─────── used, version, ended, stop ──►

With ``layout="packed"`` or ``"padded"`` a batch is a dict of tensors (in_place.py), each payload copied once, without
Python code for a payload.

Use worker processes where `collate` takes much time. Without them nothing is copied, and the next batch is prefetched
as well.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

from transport.adapters.torch.in_place import tensor_batch
from transport.adapters.torch.tensors import tensors
from transport.claims.open import open_queue
from transport.errors import UsageError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.mixin import FetchedBatch, UCXXDataPackerMixin
from transport.packer.options import ClientOptions
from transport.packer.stream import BatchStream
from transport.queue.base import TicketQueue
from transport.ring.batch_shape import BatchLayout, Shape
from transport.runtime.arguments import at_least, seconds
from transport.settings import DEFAULTS
from transport.ticket import Metadata
from transport.wire.ucx import check_fork

# tensors.py has said what to do where torch is missing
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # isort: skip

_PACKER: Final = inspect.signature(UCXXDataPackerMixin.setup_ucxx_packer)
_PARENT_S: Final = 1.0  # how often a waiting worker checks that its trainer is alive


class Sample(NamedTuple):
    """One payload: its tensors by name, and the writer's small values."""

    tensors: dict[str, Any]
    metadata: Metadata


class _Delivery(NamedTuple):
    """A batch from a worker process, with the worker's number and its token there."""

    worker: int
    token: str
    data: Any


class _End:
    """What a worker process says behind its last batch where the rollouts have ended."""


class TicketDataset(IterableDataset):  # type: ignore[misc]  # torch is not there when types are checked
    """Batches for the tickets of a queue. Iterate over it, or give it to a `TicketLoader`.

    Args:
        queue: URL for `open_queue`, which every process opens itself; or a queue, but not for spawned workers.
        batch_size: payloads of a batch, at most; failed payloads are left out and reported to the queue.
        collate: makes a batch from a list of `Sample`; None: the list itself. With a padded or packed ``layout`` it is
            given the dict of tensors and the list of the payloads' metadata; None: the dict. Runs in the worker
            process, if any.
        layout: "list"; or "padded" or "packed" for payloads of one schema, as `SharedRingBuffer.claim_batch` has them.
        shape: with such a layout, its ``fill``, ``pad_to``, ``memory`` and ``most_memory``.
        fill_s: seconds for which an incomplete batch waits for more tickets.
        idle_s: the iteration ends after so many seconds without a ticket, or when all rollouts have ended (give
            ``expected_rollouts=`` where you know how many there are); None: then only.
        options: of `UCXXDataPackerMixin.setup_ucxx_packer`; must be picklable for spawned workers.
    """

    def __init__(
        self,
        queue: str | TicketQueue,
        *,
        batch_size: int = 1,
        collate: Callable[..., Any] | None = None,
        layout: BatchLayout = "list",
        shape: Mapping[str, Any] | None = None,
        fill_s: float = 1.0,
        idle_s: float | None = None,
        **options: Any,
    ) -> None:
        seconds(fill_s, "fill_s")
        seconds(idle_s, "idle_s")
        _PACKER.bind(None, queue=queue, **options)  # TypeError for what it does not take
        self.policy_version: int | None = None  # that is trained now, with max_policy_age; see `TicketLoader`
        self._queue = queue
        self._batch_size = at_least(1, batch_size, "batch_size")
        self._shape = Shape(layout=layout, **(shape or {}))
        if self._shape.out is not None:
            raise UsageError("out= would be overwritten by the next batch; leave it out of the shape")
        if layout != "list" and options.get("client", ClientOptions()).device is not None:
            raise UsageError(
                f"layout={layout!r} reads to the host: leave ClientOptions(device=…) out, and give "
                'shape={"memory": "torch"} for batches in device memory'
            )
        if layout != "list" and options.get("joined"):
            raise UsageError(
                f"layout={layout!r} lays payloads of one schema out in place, and joined=True has several in one: use "
                "the layout list, with collate="
            )
        self._collate = collate
        self._fill_s, self._idle_s = fill_s, idle_s
        if options.get("consumed") is None:
            options["consumed"] = ConsumedRecord(options.get("settings") or DEFAULTS)
        self._options = options
        self._orders: Sequence[multiprocessing.connection.Connection] = ()  # of the trainer, one for each worker
        self._in_hand: tuple[BatchStream, FetchedBatch] | None = None
        self._in_workers = False  # a loader of it has worker processes, which keep the records of what they consumed
        self._behind_end = False  # an iteration has met the end of data, which a later queue may know nothing of

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned worker."""
        if not isinstance(self._queue, str):
            raise UsageError(
                f"a spawned worker opens the queue itself: give its URL, not a {type(self._queue).__name__}"
            )
        return {**self.__dict__, "_in_hand": None}

    def __iter__(self) -> Iterator[Any]:
        """Batches; asking for the next one acknowledges the previous one.

        Raises the errors of queue and packer, and UsageError in a worker process with options that do not work there,
        and in a loader that asks ahead, which is known of DataLoader with a batch size and of Accelerate.
        """
        worker = get_worker_info()
        if worker is None:
            _check_in_turn()
            return self._in_this_process()
        check_fork()  # also where the first payloads are mapped: it would end at the first that is not
        if self._options.get("client", ClientOptions()).device is not None or self._shape.memory != "host":
            raise UsageError(
                "ClientOptions(device=…) and a shape's memory= need num_workers=0: only the trainer process reads into "
                "its device memory"
            )
        if not self._orders:
            raise UsageError("a TicketDataset with worker processes needs a TicketLoader; use it instead of DataLoader")
        return _in_a_worker(self, worker.id, self._orders[worker.id])

    def _in_this_process(self) -> Iterator[Any]:
        with self.stream() as stream:
            while True:
                stream.policy_version = self.policy_version
                batch = stream.next()
                if batch is None:
                    self._behind_end |= stream.ended
                    return
                self._in_hand = stream, batch
                try:
                    yield self.collated(batch)
                    self.consume()
                finally:
                    self._in_hand = None

    def consume(self) -> None:
        """Acknowledge the current batch now, before leaving the loop. Idempotent. For iteration in this process."""
        if self._in_hand is not None:
            stream, batch = self._in_hand
            self._in_hand = None
            stream.used(batch)

    # --- in a checkpoint ----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs for the loop to go on behind the batch that it has. StatefulDataLoader asks for it.

        The batch in hand counts as learned. It is acknowledged when the next one is asked for, behind the checkpoint: a
        trainer that is killed in between gets it again, and a dataset with this state leaves it out.

        UsageError: a `TicketLoader` of this dataset has worker processes.
        """
        self._check_own()
        if self._in_hand is not None:
            stream, batch = self._in_hand
            return {"consumed": stream.record_with(batch)}
        return {"consumed": self._options["consumed"].to_bytes()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, before the loop begins. UsageError: no such state, or as for `state_dict`."""
        self._check_own()
        record = state.get("consumed") if isinstance(state, Mapping) else None
        if not isinstance(record, bytes):
            raise UsageError(f"{state!r:.80} is not what state_dict() of a TicketDataset returns")
        settings = self._options.get("settings") or DEFAULTS
        self._options["consumed"] = ConsumedRecord.from_bytes(record, settings)

    def _check_own(self) -> None:
        if self._in_workers:
            raise UsageError("the state of a TicketDataset needs num_workers=0: each worker has its own record")

    # --- used by both -----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def stream(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[BatchStream]:
        """A stream on a queue that this process opens."""
        with contextlib.ExitStack() as stack:
            queue = stack.enter_context(open_queue(self._queue)) if isinstance(self._queue, str) else self._queue
            waits: dict[str, Any] = {"fill_s": self._fill_s, "idle_s": self._idle_s, "stopping": stopping}
            made = stack.enter_context(BatchStream(queue, self._batch_size, **waits, **self._options))
            made.behind_end = self._behind_end
            yield made

    def collated(self, batch: FetchedBatch) -> Any:
        """The batch for the loop. From then on only its tensors keep the payloads' memory."""
        payloads = batch.payloads
        data: Any
        if self._shape.layout == "list":
            data = [Sample(tensors(payload), payload.metadata) for payload in payloads]
            data = data if self._collate is None else self._collate(data)
        else:
            data = tensor_batch(payloads, self._shape)
            if self._collate is not None:
                data = self._collate(data, [payload.metadata for payload in payloads])
        batch.release()
        return data


def _check_in_turn() -> None:
    """UsageError: who iterates asks for more before the loop has used a batch, and would acknowledge that.

    A loader does not say so to its dataset. It is found in the stack, once for each iteration.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        match frame.f_globals.get("__name__"):  # f_locals of the trainer's own frames would keep its last batch
            case "torch.utils.data._utils.fetch" if frame.f_locals["self"].auto_collation:
                raise UsageError(
                    "a DataLoader with a batch_size asks for several batches at once, and so would acknowledge those "
                    "that were not trained on: use TicketLoader(dataset), or DataLoader(dataset, batch_size=None), and "
                    "TicketDataset(…, batch_size=…)"
                )
            case "accelerate.data_loader":
                raise UsageError(
                    "Accelerate's loaders ask for a batch ahead, and so would acknowledge one that was not trained on: "
                    "iterate over the TicketLoader itself, and give prepare() the model and the optimizer alone"
                )
        frame = frame.f_back


# --- in a worker process --------------------------------------------------------------------------------
class _Trainer:
    """The trainer's orders to this worker, carried out as they arrive."""

    def __init__(self, orders: multiprocessing.connection.Connection) -> None:
        self._orders = orders
        self.stopped = False
        self.unused: dict[str, FetchedBatch] = {}
        self.stream: BatchStream | None = None

    def listen(self, timeout_s: float = 0.0) -> bool:
        """Carry out the waiting orders; True when the trainer has stopped."""
        try:
            while not self.stopped and self._orders.poll(timeout_s):
                self._obey(*self._orders.recv_bytes().decode().split())
                timeout_s = 0.0
        except (EOFError, OSError):
            self.stopped = True
        self.stopped = self.stopped or self._gone()
        return self.stopped

    def _gone(self) -> bool:
        parent = multiprocessing.parent_process()
        return parent is not None and not parent.is_alive()

    def follow(self) -> None:
        """End this process if the trainer is gone.

        torch watches the process that is the parent when the worker begins: another one, where the trainer was killed
        before.
        """
        if self._gone():
            os._exit(1)

    def _obey(self, order: str, value: str) -> None:
        assert self.stream is not None
        match order:
            case "used":
                self.stream.used(self.unused.pop(value))
            case "version":
                self.stream.policy_version = int(value)
            case "ended":
                self.stream.behind_end = True
            case "stop":
                self.stopped = True


def _in_a_worker(
    dataset: TicketDataset, number: int, orders: multiprocessing.connection.Connection
) -> Iterator[_Delivery | _End]:
    trainer = _Trainer(orders)
    with contextlib.ExitStack() as stack:
        stack.callback(trainer.follow)  # behind the stream's end, which gives its claims back
        stream = stack.enter_context(dataset.stream(trainer.listen))
        stream.policy_version = dataset.policy_version
        trainer.stream = stream
        serial = 0
        try:
            while (batch := stream.next()) is not None:
                serial += 1
                delivery = _Delivery(number, str(serial), dataset.collated(batch))
                trainer.unused[delivery.token] = batch
                yield delivery
                del delivery  # the loader holds its tensors now
            if stream.ended:
                yield _End()
        finally:  # unused batches belong to the trainer until it stops
            while trainer.unused and not trainer.listen(_PARENT_S):
                pass


class TicketLoader(DataLoader):  # type: ignore[misc]  # torch is not there when types are checked
    """torch's DataLoader for a `TicketDataset`; it reports used batches to the worker processes.

    The queue alone decides the order: a batch is given as soon as a worker has it. In torch's order, worker by worker,
    it would wait for a worker that has none, and whose iteration ends only when this batch is used.

    Args:
        dataset: makes the batches, so batch_size, sampler and collate_fn are not accepted here.
        num_workers: 0: the trainer's own process fetches, and tensors are views of the received memory.
        options: of torch.utils.data.DataLoader. If this process has a client or a server, workers need
            ``multiprocessing_context="spawn"``.
    """

    def __init__(self, dataset: TicketDataset, *, num_workers: int = 0, **options: Any) -> None:
        own = {"batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn", "drop_last"} & options.keys()
        if own:
            raise UsageError(f"{', '.join(sorted(own))}: the TicketDataset makes the batches; leave these options out")
        if options.get("persistent_workers"):
            raise UsageError(
                "persistent_workers=True is not supported: unused payloads are given back when a worker ends"
            )
        if options.setdefault("in_order", False):
            raise UsageError("in_order=True: the loop would wait for a worker that waits for the loop; leave it out")
        super().__init__(dataset, num_workers=num_workers, batch_size=None, collate_fn=_as_it_is, **options)
        dataset._in_workers |= num_workers > 0
        self._workers: list[multiprocessing.connection.Connection] = []  # of the iteration under way
        self._in_hand: _Delivery | None = None

    def __iter__(self) -> Iterator[Any]:
        """Batches as `collate` makes them. Asking for the next one acknowledges the last one; one loop at a time."""
        return self._own() if self.num_workers == 0 else self._from_workers()

    def _own(self) -> Iterator[Any]:
        yield from super().__iter__()

    def _from_workers(self) -> Iterator[Any]:
        context = self.multiprocessing_context or multiprocessing
        pipes = [context.Pipe(duplex=False) for _ in range(self.num_workers)]
        ours = [sending for _, sending in pipes]
        self.dataset._orders = [receiving for receiving, _ in pipes]
        batches = None
        try:
            batches = super().__iter__()
            for receiving, _ in pipes:
                receiving.close()  # the workers have theirs
            self._workers = ours
            for delivery in batches:
                if isinstance(delivery, _End):  # a worker that began later may know nothing of it
                    self.dataset._behind_end = True
                    for worker in ours:
                        _tell(worker, "ended 0")
                    continue
                self._in_hand = delivery
                yield delivery.data
                self.consume()
        finally:
            self._in_hand, self._workers, self.dataset._orders = None, [], ()
            for worker in ours:
                _tell(worker, "stop 0")
            del batches  # ends the workers, once they have given back what was not used
            for receiving, sending in pipes:
                receiving.close()
                sending.close()

    def consume(self) -> None:
        """Acknowledge the current batch now; call it before leaving the loop early. Idempotent."""
        if self.num_workers == 0:
            self.dataset.consume()
        elif self._in_hand is not None:
            delivery, self._in_hand = self._in_hand, None
            _tell(self._workers[delivery.worker], f"used {delivery.token}")

    def set_policy_version(self, version: int) -> None:
        """Set the version in training, for ``max_policy_age``: it limits the payloads claimed from now on."""
        self.dataset.policy_version = version
        for worker in self._workers:
            _tell(worker, f"version {version}")


def _tell(worker: multiprocessing.connection.Connection, order: str) -> None:
    with contextlib.suppress(OSError):  # an ended worker has given its claims back, or their leases end
        worker.send_bytes(order.encode())


def _as_it_is(data: Any) -> Any:
    return data
