"""vLLM's pair of weight transfer engines, under the backend name "payload_transport".

vLLM finds the receiving one by the entry point `vllm.general_plugins`; a trainer imports this module and makes its side
by `WeightTransferTrainerFactory.trainer_init(Init(…), client=…, source=…)`. Without functions of yours the source's
whole tensors go to all workers, whose models load them by `load_weights`. With ``shards`` and ``worker_shards``
("module:function") every rank sends what it has, and each worker receives what it wants into its own parameters: the
functions return `RankShards`; they are called with the `WeightSource` on trainers, with vLLM's engine on workers.

    trainers' ranks   stage: every rank sends ────────────────► commit
    vLLM's calls      start, update, finish                     [pause], start, update, finish, [resume]
    workers           land beside the weights, and generate     load

A worker loads within one call, between two steps of its scheduler. ``pause`` names the mode of vLLM's
`pause_generation` for the time of that call: then the client has the methods of `PausingHTTPClient`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from transport.devices.host_tensors import as_tensor
from transport.errors import UsageError
from transport.runtime.releases import require_fitting
from transport.weights.barrier import UpdateBarrier
from transport.weights.barrier_rank import BarrierRank
from transport.weights.rank_shards import RankShards, described

require_fitting("vllm")

BACKEND = "payload_transport"


@dataclass
class WorkerInit(WeightTransferInitInfo):  # type: ignore[misc]  # vllm's are not there when types are checked
    """Input of `init_weight_transfer_engine`: fields of `UpdateBarrier`, the function, options of `WeightsEngine`."""

    barrier: dict[str, Any] = field(repr=False)  # the URL of its store may contain a password
    shards: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Argument of `update_weights`: "stage" begins to receive a version, and returns; "commit" loads it."""

    version: int
    phase: str


@dataclass
class Init(TrainerInitInfo):  # type: ignore[misc]
    """Argument of `trainer_init`, on every trainer rank.

    barrier: fields of `UpdateBarrier`. version: of the last update, where a trainer goes on with its numbers.
    pause: "abort", "wait" or "keep", around the load; "": running requests go on.
    """

    backend: ClassVar[str] = BACKEND

    barrier: dict[str, Any] = field(repr=False)
    shards: str = ""
    worker_shards: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    worker_options: dict[str, Any] = field(default_factory=dict)
    pause: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        if bool(self.shards) != bool(self.worker_shards) or self.pause not in ("", "abort", "wait", "keep"):
            raise UsageError(
                f"shards={self.shards!r}, worker_shards={self.worker_shards!r}, pause={self.pause!r}: give both "
                'functions or none, and "abort", "wait", "keep" or ""'
            )


class PausingHTTPClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """vLLM's client of its HTTP routes, with those that pause."""

    def pause_generation(self, mode: str) -> None:
        """Stop generating."""
        self._post(f"pause?mode={mode}")

    def resume_generation(self) -> None:
        """Generate again."""
        self._post("resume")


class Receiver(WeightTransferEngine[WorkerInit, Update]):  # type: ignore[misc]
    """A worker's side."""

    init_info_cls = WorkerInit
    update_info_cls = Update
    supports_draft_weight_update = False
    _member: BarrierRank | None = None

    def init_transfer_engine(self, init_info: WorkerInit) -> None:
        """Take part in updates from now on; what an earlier trainer has begun ends."""
        self.shutdown()
        self._barrier = UpdateBarrier(**init_info.barrier)
        parallel = self.parallel_config
        if init_info.shards:
            rank, load = described(init_info.shards, self), None
        else:
            number = parallel.data_parallel_index * parallel.world_size + parallel.rank
            rank, load = RankShards(number, None, {}), self._load_whole
        self._member = BarrierRank(rank, sends=False, load=load, **init_info.options)

    def start_weight_update(self) -> None:
        """Do nothing: weights change in one call of `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Do nothing: see `start_weight_update`."""

    def receive_weights(self, update_info: Update) -> None:
        """Begin to receive a version, or load it. Raises what the load raised, here or on another rank."""
        if self._member is None:
            raise UsageError("call init_weight_transfer_engine before update_weights")
        if update_info.phase == "stage":
            self._barrier.begin(self._member, update_info.version)
        else:
            self._barrier.commit(self._member, update_info.version)

    def _load_whole(self, tensors: dict[str, Any]) -> None:
        """Load tensors of the checkpoint's names; the model derives the others from them (quantised, fused)."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights([(name, as_tensor(array)) for name, array in tensors.items()])
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        if self._member is not None:
            self._member.close()
        self._member = None  # last, so that after an interrupt the next call finishes


class Sender(TrainerWeightTransferEngine[Init]):  # type: ignore[misc]
    """A trainer rank's side. Rank 0 also makes vLLM's calls."""

    init_info_cls = Init

    @classmethod
    def trainer_init(cls, init_info: Init, *, client: Any, source: Any = None) -> Self:
        """Make it; rank 0 also has the workers make theirs, anew if an earlier trainer's are there."""
        if source is None:
            raise UsageError("trainer_init() without source=: give the WeightSource of this rank")
        if init_info.pause and not hasattr(client, "pause_generation"):
            raise UsageError(f"pause={init_info.pause!r} needs a client with pause_generation and resume_generation")
        made: Self = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        made._version, made._pause = init_info.version, init_info.pause
        made._barrier = UpdateBarrier(**init_info.barrier)
        shards = RankShards(made.rank, None, made._whole)
        if init_info.shards:
            shards = described(init_info.shards, source)
        made._member = BarrierRank(shards, sends=True, **init_info.options)
        if made.is_sender:
            info = {"barrier": init_info.barrier, "shards": init_info.worker_shards}
            try:
                client.init_weight_transfer_engine({**info, "options": init_info.worker_options})
            except BaseException:  # an interrupt, too: nobody else could release what was made
                made.shutdown()
                raise
            with contextlib.suppress(Exception):  # vLLM refuses it where no session is open
                client.finish_weight_update()  # of a trainer that was killed in the middle of an update
        return made

    def send_weights(self) -> None:
        """One update: all workers have loaded it, or all serve what they served. Raises the first error.

        After an error of the load, with ``pause``, generation stays paused until an update succeeds.
        """
        self._version += 1
        self._barrier.stage(self._member, self._version, self._call("stage"))
        self._barrier.commit(self._member, self._version, self._call("commit"))

    def _call(self, phase: str) -> Any:
        """vLLM's calls of a phase, which wait for the workers, or None."""
        if not self.is_sender:
            return None
        pause = self._pause if phase == "commit" else ""

        def call() -> None:
            if pause:
                self.client.pause_generation(mode=pause)
            self.client.start_weight_update()
            self.client.update_weights({"version": self._version, "phase": phase})
            self.client.finish_weight_update(str(self._version) if phase == "commit" else None)
            if pause:
                self.client.resume_generation()

        return call

    def _whole(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.source.iter_full():
            yield name, tensor.detach()

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        self._member.close()


def register() -> None:
    """Register both; again is no error."""
    for factory, kind in ((WeightTransferEngineFactory, Receiver), (WeightTransferTrainerFactory, Sender)):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, kind)
