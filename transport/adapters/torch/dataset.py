"""Payloads in a torch training loop: batches of tensors, in the trainer's process or taken by worker processes.

    dataset = TicketDataset("rings:run", schema, batch_size=64, collate=pad)
    for batch in TicketLoader(dataset, num_workers=2):
        ...                    # asking for the next batch consumes this one

torchdata's StatefulDataLoader takes the dataset as well (``batch_size=None``), and resumes in the middle of an epoch.

A batch is consumed when the loop asks for the next one. If the loop ends early, its last batch is given back, unless
`consume` was called. The claims of a killed trainer end with it: a batch that it trained on without asking for the next
one is trained on again, from the checkpoint it restarts with.

    trainer                                    worker process (num_workers > 0): a trainer of its own
    TicketLoader ◄──── batches, copied ─────── TicketDataset ──► takes, consumes
                 ─────── used, version, ended, stop ──►

With ``steps={"groups": 64}`` an item is a training step: a list of micro-batches, each as a batch would be.

With ``layout="packed"`` or ``"padded"`` a batch is a dict of tensors, each payload copied once, without Python code for
a payload. Use worker processes where `collate` takes much time; without them nothing is copied.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import msgspec

from transport.adapters.torch.tensors import tensors
from transport.claims.rings import FoundRings
from transport.devices.host_tensors import as_tensors
from transport.errors import SchemaError, UsageError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions
from transport.ring.batch_shape import BatchLayout, Shape
from transport.runtime.arguments import at_least, seconds
from transport.schema import Schema
from transport.settings import DEFAULTS
from transport.ticket import Metadata
from transport.training.batch import Batch
from transport.training.micro_batch import MicroBatch
from transport.training.payloads import Payloads
from transport.training.steps import Step
from transport.training.trainer import Trainer
from transport.wire.ucx import check_fork

# tensors.py has said what to do where torch is missing
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # isort: skip

_OPTIONS: Final = {
    name
    for name, each in inspect.signature(Trainer.__init__).parameters.items()
    if each.kind is inspect.Parameter.KEYWORD_ONLY
}
_SLICE_S: Final = 0.25  # of a wait for payloads, after which the end is looked for
_MEET_S: Final = 2.0  # after which a trainer has met the rollouts that go on, also at addresses
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
    """A worker process's message behind its last batch where the rollouts have ended."""


class TicketDataset(IterableDataset):  # type: ignore[misc]  # torch is not there when types are checked
    """Batches from the rings of a run. Iterate over it, or give it to a `TicketLoader`.

    Args:
        rings: text for `open_rings`, which every process opens itself; or opened rings, but not for spawned workers.
        schema: of the payloads; several, or None for any.
        batch_size: payloads of a batch, at most; failed payloads are left out.
        collate: makes a batch from a list of `Sample`; None: the list itself. With a padded or packed ``layout`` it is
            given the dict of tensors and the list of the payloads' metadata; None: the dict. Runs in the worker
            process, if any.
        layout: "list"; or "padded" or "packed" for payloads of one schema, see `Trainer`.
        steps: the arguments of `Trainer.steps`: an item is the list of a step's micro-batches, as many on every rank of
            ``mesh=``. A micro-batch is a dict of tensors, with ``groups``: of each payload the position of its group in
            the step (int64). In this process alone, and until the data ends. None: items are batches.
        shape: with such a layout, its ``fill``, ``pad_to``, ``memory`` and ``most_memory``.
        fill_s: seconds for which an incomplete batch waits for more payloads.
        idle_s: the iteration ends after so many seconds without a payload, or when all rollouts have ended (give
            ``expected_rollouts=`` where you know how many there are); None: then only.
        options: of `Trainer`; must be picklable for spawned workers.
    """

    def __init__(
        self,
        rings: str | FoundRings,
        schema: Schema | Sequence[Schema] | None = None,
        *,
        batch_size: int = 1,
        collate: Callable[..., Any] | None = None,
        layout: BatchLayout = "list",
        steps: Mapping[str, Any] | None = None,
        shape: Mapping[str, Any] | None = None,
        fill_s: float = 1.0,
        idle_s: float | None = None,
        **options: Any,
    ) -> None:
        seconds(fill_s, "fill_s")
        seconds(idle_s, "idle_s")
        if strange := options.keys() - _OPTIONS:
            raise TypeError(f"TicketDataset() and Trainer() have no argument {', '.join(sorted(strange))}")
        self.version: int | None = None  # that is trained now, with max_age; see `TicketLoader`
        self._rings = rings
        self._schema = schema
        self.batch_size = at_least(1, batch_size, "batch_size")
        self._shape = Shape(layout=layout, **(shape or {}))
        if self._shape.out is not None:
            raise UsageError("out= would be overwritten by the next batch; leave it out of the shape")
        client = options.get("client", ClientOptions())
        if client.device is not None:
            raise UsageError(
                'ClientOptions(device=…) is for reads by ticket: give layout="padded" or "packed" and '
                'shape={"memory": "torch"} for batches in device memory'
            )
        if layout != "list" and options.get("joined"):
            raise UsageError("joined=True has payloads of several schemas in one: use the layout list, with collate=")
        if steps is not None and (idle_s is not None or batch_size != 1):
            raise UsageError("a step has the groups that steps= says: leave batch_size and idle_s out")
        if steps is not None and layout == "list":
            raise UsageError('micro-batches are dicts of tensors: give layout="padded" or "packed" with steps=')
        self._settings = client.settings or DEFAULTS
        self._steps = steps
        self._collate = collate
        self.fill_s, self.idle_s = fill_s, idle_s
        if options.get("record") is None:
            options["record"] = ConsumedRecord(self._settings)
        self._options = options
        self._orders: Sequence[multiprocessing.connection.Connection] = ()  # of the trainer, one for each worker
        self._in_hand: tuple[Trainer, Batch | Step] | None = None  # of the latest iteration
        self._turn = object()  # of the latest iteration
        self._said: ConsumedRecord | None = None  # the latest state, until the batch that was in hand is consumed
        self._in_workers = False  # a loader of it has worker processes, which keep the records of what they consumed
        self._behind_end = False  # an iteration has met the end of data, of which later ones may know nothing

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker."""
        if not isinstance(self._rings, str):
            raise UsageError(
                f"a spawned worker opens the rings itself: give their text, not {type(self._rings).__name__}"
            )
        return {**self.__dict__, "_in_hand": None}

    def __iter__(self) -> Iterator[Any]:
        """Batches; asking for the next one consumes the previous one. One loop at a time: a new one ends the others.

        Raises the errors of `Trainer`, and UsageError in a worker process with options that do not work there,
        in a loader that asks ahead, which is known of DataLoader with a batch size and of Accelerate, and where a loop
        goes on after another one has begun: its batch was given back.
        """
        worker = get_worker_info()
        if worker is None:
            _check_in_turn()
            return self._in_this_process()
        if self._steps is not None:
            raise UsageError("steps= needs num_workers=0: a step has one reader in each rank")
        check_fork()  # also where the first payloads are mapped: it would end at the first that is not
        if self._shape.memory != "host":
            raise UsageError("a shape's memory= needs num_workers=0: only the trainer process has its device memory")
        if not self._orders:
            raise UsageError("a TicketDataset with worker processes needs a TicketLoader; use it instead of DataLoader")
        return _in_a_worker(self, worker.id, self._orders[worker.id])

    def _in_this_process(self) -> Iterator[Any]:
        turn = self._turn = object()
        self._in_hand = None  # what another loop has in hand is given back
        with self.stream() as stream:
            while True:
                stream.trainer.version = self.version
                batch = stream.next() if self._steps is None else stream.next_step(self._steps)
                if batch is None:
                    self._behind_end |= stream.ended
                    return
                self._in_hand = stream.trainer, batch
                try:
                    data = self.collated(batch)
                    del batch
                    yield data
                    del data
                    _require_latest(self._turn is turn)
                    self.consume()
                finally:
                    if self._turn is turn:
                        self._in_hand = None

    def consume(self) -> None:
        """Consume the current batch now, before leaving the loop. Idempotent. For iteration in this process."""
        if self._in_hand is not None:
            _, batch = self._in_hand
            self._in_hand = None
            batch.consume()
            self._said = None  # the trainer's record has it

    # --- in a checkpoint ----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs for the loop to go on behind the batch in hand. StatefulDataLoader asks.

        The batch in hand counts as learned. It is consumed when the next one is asked for, behind the checkpoint: a
        trainer that is killed in between gets it again, and a dataset with this state leaves it out, as does the next
        loop of this one where this loop ends before.

        UsageError: a `TicketLoader` of this dataset has worker processes.
        """
        self._check_own()
        if self._in_hand is not None:
            trainer, batch = self._in_hand
            batch.accept()
            self._said = trainer.record
        return {"consumed": (self._options["record"] if self._said is None else self._said).to_bytes()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, before the loop begins. UsageError: no such state, or as for `state_dict`."""
        self._check_own()
        record = state.get("consumed") if isinstance(state, Mapping) else None
        if not isinstance(record, bytes):
            raise UsageError(f"{state!r:.80} is not what state_dict() of a TicketDataset returns")
        self._options["record"], self._said = ConsumedRecord.from_bytes(record, self._settings), None

    def _check_own(self) -> None:
        if self._in_workers:
            raise UsageError("the state of a TicketDataset needs num_workers=0: each worker has its own record")

    # --- used by both -----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def stream(self, stopping: Callable[[], object] = lambda: False) -> Iterator[_TrainerBatches]:
        """Open a trainer in this process, and the wait for its batches."""
        if self._said is not None:
            self._options["record"], self._said = self._said, None
        shape = {} if self._shape.layout == "list" else msgspec.structs.asdict(self._shape)
        with Trainer(self._schema, self._rings, **self._options, **shape) as trainer:
            yield _TrainerBatches(trainer, self, stopping, behind_end=self._behind_end)

    def collated(self, batch: Batch | Step) -> Any:
        """Make of a batch what the loop gets. From then on only its tensors keep the payloads' memory."""
        data: Any
        if isinstance(batch, Step):
            return [self._collated_micro(micro) for micro in batch]
        if self._shape.layout == "list":
            data = [Sample(tensors(payload), payload.metadata) for payload in batch]
            return data if self._collate is None else self._collate(data)
        data = _tensor_batch(batch)
        return data if self._collate is None else self._collate(data, batch.metadata)

    def _collated_micro(self, micro: MicroBatch) -> Any:
        data = _tensor_batch(micro)
        if "groups" in data:
            raise SchemaError("the schema's tensor groups has the name of what stands beside the others")
        data |= as_tensors({"groups": micro.groups})
        return data if self._collate is None else self._collate(data, micro.metadata)


def _tensor_batch(batch: Payloads) -> dict[str, Any]:
    """Tensors of all payloads by name; beside each ragged one its lengths (int64) and, packed, cu_seqlens (int32).

    Beside an optional one stands which payloads have it (bool).
    """
    found = batch.torch()
    beside: dict[str, Any] = {f"{name}.lengths": lengths for name, lengths in batch.lengths.items()}
    beside |= {f"{name}.cu_seqlens": ends for name, ends in batch.cu_seqlens.items()}
    beside |= {f"{name}.present": mask for name, mask in batch.present.items()}
    if taken := beside.keys() & found.keys():
        raise SchemaError(f"the schema's tensor {', '.join(sorted(taken))} has the name of what stands beside another")
    return found | as_tensors(beside)


class _TrainerBatches:
    """The batches of a trainer until the iteration ends.

    Attributes:
        ended: all rollouts have ended, and the stream with them.
        behind_end: another stream of this run was `ended`. This one ends, too, where it meets no rollout that goes on:
            it may have begun too late to learn of those that have ended.
    """

    def __init__(
        self, trainer: Trainer, dataset: TicketDataset, stopping: Callable[[], object], *, behind_end: bool
    ) -> None:
        self.trainer = trainer
        self.ended, self.behind_end = False, behind_end
        self._dataset = dataset
        self._stopping = stopping
        self._meets_until = time.monotonic() + _MEET_S
        self._steps: Iterator[Step] | None = None

    def next(self) -> Batch | None:
        """Take the next batch. None: the rollouts have ended, nothing came for ``idle_s``, or a stop is requested."""
        of = self._dataset
        give_up = math.inf if of.idle_s is None else time.monotonic() + of.idle_s
        while not self._stopping():
            left_s = max(0.0, min(give_up - time.monotonic(), _SLICE_S))
            batch = self.trainer.take(of.batch_size, left_s, fill_s=of.fill_s)
            if batch is not None:
                return batch
            self.ended = self.trainer.finished()
            behind = self.behind_end and time.monotonic() >= self._meets_until
            if self.ended or time.monotonic() >= give_up or (behind and self.trainer.rings.finished(0)):
                break
        return None

    def next_step(self, terms: Mapping[str, Any]) -> Step | None:
        """Take the next step. None: the data has ended."""
        if self._steps is None:
            self._steps = iter(self.trainer.steps(**terms))
        step = next(self._steps, None)
        self.ended = step is None
        return step


def _require_latest(latest: bool) -> None:
    """Raise UsageError in a loop that another one has followed, which has given back what this one had in hand."""
    if not latest:
        raise UsageError(
            "another loop over this dataset has begun, and the batch of this one was given back: use one loop at a time"
        )


def _check_in_turn() -> None:
    """UsageError: who iterates asks for more before the loop has used a batch, and would consume that.

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
        self.unused: dict[str, Batch] = {}
        self.stream: _TrainerBatches | None = None

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
                self.unused.pop(value).consume()
            case "version":
                self.stream.trainer.version = int(value)
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
        stream.trainer.version = dataset.version
        trainer.stream = stream
        serial = 0
        try:
            while (batch := stream.next()) is not None:
                serial += 1
                delivery = _Delivery(number, str(serial), dataset.collated(batch))
                trainer.unused[delivery.token] = batch
                del batch
                yield delivery
                del delivery  # the loader holds its tensors now
            if stream.ended:
                yield _End()
        finally:  # unused batches belong to the trainer until it stops
            while trainer.unused and not trainer.listen(_PARENT_S):
                pass


class TicketLoader(DataLoader):  # type: ignore[misc]  # torch is not there when types are checked
    """torch's DataLoader for a `TicketDataset`; it reports used batches to the worker processes.

    The rings alone decide the order: a batch is given as soon as a worker has it. In torch's order, worker by worker,
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
        self._turn = object()  # of the latest iteration

    def __iter__(self) -> Iterator[Any]:
        """Batches as `collate` makes them. Asking for the next one consumes the last one; one loop at a time."""
        return self._own() if self.num_workers == 0 else self._from_workers()

    def _own(self) -> Iterator[Any]:
        yield from super().__iter__()

    def _from_workers(self) -> Iterator[Any]:
        context = self.multiprocessing_context or multiprocessing
        pipes = [context.Pipe(duplex=False) for _ in range(self.num_workers)]
        ours = [sending for _, sending in pipes]
        self.dataset._orders = [receiving for receiving, _ in pipes]
        turn = self._turn = object()
        self._in_hand = batches = None
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
                _require_latest(self._turn is turn)
                self.consume()
        finally:
            if self._turn is turn:
                self._in_hand, self._workers, self.dataset._orders = None, [], ()
            for worker in ours:
                _tell(worker, "stop 0")
            del batches  # ends the workers, once they have given back what was not used
            for receiving, sending in pipes:
                receiving.close()
                sending.close()

    def consume(self) -> None:
        """Consume the current batch now; call it before leaving the loop early. Idempotent."""
        if self.num_workers == 0:
            self.dataset.consume()
        elif self._in_hand is not None:
            delivery, self._in_hand = self._in_hand, None
            _tell(self._workers[delivery.worker], f"used {delivery.token}")

    def set_version(self, version: int) -> None:
        """Set the version in training, for ``max_age``: it limits the payloads taken from now on."""
        self.dataset.version = version
        for worker in self._workers:
            _tell(worker, f"version {version}")


def _tell(worker: multiprocessing.connection.Connection, order: str) -> None:
    with contextlib.suppress(OSError):  # an ended worker has given its claims back, or their leases end
        worker.send_bytes(order.encode())


def _as_it_is(data: Any) -> Any:
    return data
