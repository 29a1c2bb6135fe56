"""The demo's epochs: a run is one, and ends with a cooldown; the next run with the same destination goes on from it.

The parent is the coordinator. Clients are those who hold the policy: the first trainer and every rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from transport.cooldown import CooldownClient, CooldownHost, EpochRecord, Ledger, recorded_outcomes, restore
from transport.cooldown.destinations.base import folder_of, normalise
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.ledger import newest_checkpoint
from transport.demo.plan import EpochPlan, Plan, WorkerConfig
from transport.demo.policy import Policy
from transport.demo.worker import Parent
from transport.errors import CheckpointDamagedError, NoCheckpointError, RunError, TransportError
from transport.runtime.blocking_calls import in_thread
from transport.store import Store
from transport.store.open import open_store

log = logging.getLogger(__name__)

COOLDOWN_S: Final = 30.0
POLICY_FILE: Final = "policy.msgpack"
_FOLLOW_S: Final = 20.0  # for the last version to reach a rollout
_LOOK_S: Final = 0.2


# --- the coordinator ------------------------------------------------------------------------------------
class Epoch:
    """One run's epoch as the parent leads it."""

    def __init__(self, store: Store, url: str, seed: int) -> None:
        self.destination = normalise(url)
        self.run = f"demo-{hashlib.sha256(self.destination.encode()).hexdigest()[:12]}"
        self.resumed_from = 0
        self._ledger = Ledger(store, self.run)
        self._host = CooldownHost(store, self.run, self.destination, cooldown_s=COOLDOWN_S, seed=seed)

    async def begin(self, plan: Plan, store: str, directory: Path) -> Plan:
        """Bring the last checkpoint into ``directory``, and open the epoch; the plan with its policy and the epoch."""
        epochs, policy = await in_thread(self._restored, directory)
        record = await self._host.open(max(epochs, default=0) + 1)
        epoch = EpochPlan(store=store, run=self.run, epoch=record.epoch, destination=self.destination)
        return msgspec.structs.replace(plan, epoch=epoch, policy=policy)

    def _restored(self, directory: Path) -> tuple[set[int], bytes]:
        """The epochs that there were, and the policy of the last checkpoint; empty: there is none.

        Raises CheckpointDamagedError for files that are no checkpoint of this demo.
        """
        folder = folder_of(self.destination)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with open_destination(self.destination) as destination:
            # Either may be new: the store on another host, the destination after it was emptied.
            epochs = {**recorded_outcomes(destination, self.run), **self._ledger.epochs()}
            try:
                record = newest_checkpoint(epochs, self.run)
            except NoCheckpointError:
                return set(epochs), b""
            restore(record, destination, directory / "restored")
        self.resumed_from = record.epoch
        try:
            return set(epochs), (directory / "restored" / POLICY_FILE).read_bytes()
        except OSError as error:
            raise CheckpointDamagedError(f"the checkpoint does not contain a policy of this demo: {error}") from error

    async def end(self, plan: Plan, updates: int) -> EpochRecord:
        """The cooldown: the first of the elected members to get there uploads the last version."""
        if plan.epoch is None:
            raise RunError("the run has no epoch to end")
        clients = ["trainer-0", *(f"rollout-{index}" for index in range(plan.rollouts))]
        return await self._host.cooldown(plan.epoch.epoch, plan.first_policy().version + updates, clients)


# --- the clients ----------------------------------------------------------------------------------------
class Membership:
    """A worker's part in the epoch. Use `join` before anything is played, `take_part` when the work is done.

    Args:
        policy: what this worker has, and uploads if it is elected.
    """

    def __init__(self, config: WorkerConfig, kind: str, parent: Parent, policy: Policy) -> None:
        self._epoch = config.plan.epoch
        self._name = f"{kind}-{config.index}"
        self._scratch = Path(config.directory) / "checkpoints" / self._name
        self._parent = parent
        self._policy = policy
        self._follow: Callable[[], None] = lambda: None

    def join(self) -> None:
        """Prove that this worker may write to the destination. Raises DestinationError and its kinds."""
        if self._epoch is not None:
            with self._client(self._epoch) as client:
                asyncio.run(client.join(self._epoch.destination))

    def take_part(self, follow: Callable[[], None] = lambda: None) -> None:
        """Upload the policy if elected; returns when the cooldown ends, or when the parent requests a stop.

        follow: brings the policy nearer to the newest version, if it is not there yet.
        """
        if self._epoch is None:
            return
        self._follow = follow
        with self._client(self._epoch) as client:
            try:
                asyncio.run(self._until_ended(client, self._epoch.epoch))
            except TransportError as error:
                log.warning(
                    "this worker does not take part in the cooldown: %s", error
                )  # the epoch may end well without this worker

    @contextmanager
    def _client(self, epoch: EpochPlan) -> Iterator[CooldownClient]:
        with open_store(epoch.store) as store:
            yield CooldownClient(store, epoch.run, self._name, save=self._save, scratch=self._scratch)

    def _save(self, folder: Path, step: int) -> None:
        give_up_at = time.monotonic() + _FOLLOW_S
        while self._policy.version != step and time.monotonic() < give_up_at and not self._parent.wants_stop():
            self._follow()
        if self._policy.version != step:
            raise RunError(
                f"timeout: version {step} of the policy did not arrive in {_FOLLOW_S:g} s; "
                f"this worker has version {self._policy.version}"
            )
        (folder / POLICY_FILE).write_bytes(self._policy.saved())

    async def _until_ended(self, client: CooldownClient, epoch: int) -> None:
        taking = asyncio.create_task(client.cooldown(epoch))
        while not taking.done():
            await asyncio.wait([taking], timeout=_LOOK_S)
            if self._parent.wants_stop():
                taking.cancel()
                await asyncio.wait([taking])
        if not taking.cancelled():
            taking.result()
