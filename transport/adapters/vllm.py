"""vLLM's pair of weight transfer engines, under the backend name "payload_transport": shards to shards.

vLLM finds the receiving one by the entry point `vllm.general_plugins`; a trainer imports this module. What a worker
wants, and what a trainer rank has, says a function of yours ("module:function" in the init infos): called with vLLM's
engine on the worker, with the `WeightSource` on the trainer, it returns `RankShards`. vLLM 0.33's interface; written
from its signatures and tested with a model of them.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from transport.errors import StoreError, WeightsError
from transport.weights.meeting import Meeting, Member, described

BACKEND = "payload_transport"


@dataclass
class ShardInit(WeightTransferInitInfo):  # type: ignore[misc]  # vllm has no types here
    """For `init_transfer_engine`: fields of `Meeting`, the function, and options of `ShardEngine`."""

    meeting: dict[str, Any] = field(repr=False)  # the URL of its store may contain a password
    shards: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ShardUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """For `update_weights`."""

    version: int


@dataclass
class ShardTrainerInit(TrainerInitInfo):  # type: ignore[misc]
    """For `trainer_init`; on every trainer rank."""

    meeting: dict[str, Any] = field(repr=False)  # the URL of its store may contain a password
    shards: str
    worker_shards: str
    options: dict[str, Any] = field(default_factory=dict)
    worker_options: dict[str, Any] = field(default_factory=dict)


class ShardReceiver(WeightTransferEngine[ShardInit, ShardUpdate]):  # type: ignore[misc]
    """A worker's side: its slices go into its own parameters."""

    init_info_cls = ShardInit
    update_info_cls = ShardUpdate

    def init_transfer_engine(self, init_info: ShardInit) -> None:
        self._meeting = Meeting(**init_info.meeting)
        self._member = Member(described(init_info.shards, self), sends=False, **init_info.options)

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: ShardUpdate) -> None:
        self._meeting.update(self._member, update_info.version)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None:
        if hasattr(self, "_member"):
            self._member.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("shards have no single stream of weights; use WeightTransferTrainerFactory")


class ShardTrainer(TrainerWeightTransferEngine[Any, ShardTrainerInit]):  # type: ignore[misc]
    """A trainer rank's side. Every rank sends its shards; the sender also makes vLLM's calls."""

    init_info_cls = ShardTrainerInit

    @classmethod
    def trainer_init(cls, config: Any, init_info: ShardTrainerInit, *, client: Any, source: Any) -> Self:
        made: Self = cls(config, client=client, source=source, is_sender=init_info.is_sender)
        made._info, made._version = init_info, 0
        made._meeting = Meeting(**init_info.meeting)
        made._member = Member(described(init_info.shards, source), sends=True, **init_info.options)
        if made.is_sender:
            info = {"meeting": init_info.meeting, "shards": init_info.worker_shards}
            client.init_weight_transfer_engine({**info, "options": init_info.worker_options})
        return made

    def send_weights(self) -> None:
        """One update. Raises what vLLM's calls raised, else what failed here."""
        self._version += 1
        called: list[BaseException] = []
        thread = threading.Thread(target=self._call, args=(called,), name="vLLM's weight update")
        if self.is_sender:
            thread.start()
        try:
            self._meeting.update(self._member, self._version)
        except WeightsError as error:
            if self.is_sender:
                thread.join()
            if called:
                raise called[0] from error
            raise
        if self.is_sender:
            thread.join()
            if called:
                raise called[0]
            self.client.finish_weight_update()

    def _call(self, called: list[BaseException]) -> None:
        try:
            self.client.start_weight_update()
            self.client.update_weights({"version": self._version})
        except BaseException as error:  # raised by the thread that joins this one
            called.append(error)
            with contextlib.suppress(StoreError):  # the trainer's ranks wait for workers that may never come
                self._meeting.fail(self._version, f"vLLM: {type(error).__name__}: {error}")

    def shutdown(self) -> None:
        self._member.close()


def register() -> None:
    """Register both; again is no error. The entry point calls it in every process of vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, kind in ((WeightTransferEngineFactory, ShardReceiver), (WeightTransferTrainerFactory, ShardTrainer)):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, kind)
