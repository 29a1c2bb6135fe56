"""One member of a simulated run: its way to the store, its session, and the coordinator if it has rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from store_proxy import FailingStore, Killed

from transport.cooldown.epochs.coordinator import StoredCoordinator
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import Checkpoint, EpochRecord, Refusal, ReportKind, UploadReport
from transport.cooldown.epochs.records import Phase as EpochPhase
from transport.errors import StaleRoundError, StoreError, UsageError
from transport.rendezvous.member_states import State
from transport.rendezvous.session import Session
from transport.store.base import Change

RUN: Final = "run"
_COOLDOWN_S: Final = 40.0
_RENEWED: Final = 0.95  # of a lease for which a seat is renewed although no answer comes; the store is away at its end


class _Line(FailingStore):
    """One member's way to the store."""

    def __init__(self, world: Any, name: str) -> None:
        super().__init__(world.store)
        self._world, self._name = world, name
        self.away_from = self.away_until = self.forgets_until = 0.0

    @property
    def down(self) -> bool:  # type: ignore[override]
        now = self._world.now
        return bool(now < self._world.away_until or self.away_from <= now < self.away_until)

    @property
    def forgets_answers(self) -> bool:  # type: ignore[override]
        return bool(self._world.now < self.forgets_until)

    def before_write(self, changes: Sequence[Change]) -> None:
        self._world.meanwhile(self._name, any(b'"phase":"ended"' in (change.value or b"") for change in changes))

    def wrote(self, change: Change) -> None:
        self._world.written(self._name, change)


class Member:
    """One process."""

    def __init__(self, world: Any, name: str) -> None:
        self.world, self.name = world, name
        self.skew_s = world.rng.choice([0.0, 0.0, world.rng.uniform(-600.0, 600.0)])
        self.alive = True
        self.stopped_until = 0.0
        self.line = _Line(world, name)
        self.session = Session(
            self.line, RUN, name, world.rules, address=f"{name}:1", clock=lambda: world.now + self.skew_s
        )
        self.ledger = Ledger(self.line, RUN)
        self.coordinator: StoredCoordinator | None = None
        self.reported: set[int] = set()
        self.unheard_s = 0.0  # for so long it learns nothing, from when it waits for others in a round

    def do(self, action: Callable[[], object]) -> None:
        """What the program does; a death ends it."""
        if not self.alive or self.world.now < self.stopped_until:
            return
        try:
            action()
        except Killed:
            self.alive = False
        except (StoreError, StaleRoundError):
            self.coordinator = None  # it begins again with what the store has

    def step(self) -> None:
        if self.unheard_s and self.session.view.state is State.SEATED:
            self.line.forgets_until = self.line.away_from = self.world.now + _RENEWED * self.world.rules.lease_s
            self.line.away_until = self.world.now + self.unheard_s
            self.unheard_s = 0.0
        self.session.step()
        if self.session.view.state is State.AWAY:  # its round is over
            self.session.join()
        view = self.session.view
        if view.state is State.STANDBY or view.state is State.ACTIVE:
            assert view.place is not None
            self.world.placed(self, view.place)
        if view.state is State.ACTIVE and view.place is not None:
            if view.place.rank == 0:
                self._coordinate()
            else:
                self.coordinator = None
            self._upload()

    # --- epochs -------------------------------------------------------------------------------------------
    def _coordinate(self) -> None:
        if self.coordinator is None:
            epoch = self._epoch()
            if epoch is None:
                return
            self.coordinator = StoredCoordinator(self.ledger, epoch, wall=lambda: self.world.now)
        coordinator = self.coordinator
        if coordinator.machine.record.phase is EpochPhase.TRAINING:
            members = tuple(peer.member for peer in self.session.roster().peers)
            coordinator.machine.begin(coordinator.machine.record.epoch, members)
        try:
            for report in coordinator.step(self.world.now + self.skew_s):
                self._verify(coordinator, report)
            coordinator.write()
        except UsageError:
            if not self._begun_by_another(coordinator):
                raise
            self.coordinator = None  # it resumes what the other one has begun
            return
        if coordinator.ended():
            self.coordinator = None

    def _begun_by_another(self, coordinator: StoredCoordinator) -> bool:
        """Return whether the cooldown that this member would have begun stands with the members of another round."""
        mine = coordinator.machine.record
        theirs, _ = self.ledger.look(mine.epoch)
        return theirs is not None and theirs.phase is EpochPhase.COOLDOWN and theirs.clients != mine.clients

    def _epoch(self) -> int | None:
        """The epoch that is not over; a new one, when its time has come."""
        known = self.ledger.epochs()
        last = max(known, default=0)
        if known and known[last].phase is not EpochPhase.ENDED:
            return last
        if self.world.now < self.world.next_epoch_at:
            return None
        record = EpochRecord(run=RUN, epoch=last + 1, destination="", cooldown_s=_COOLDOWN_S, seed=self.world.seed)
        return record.epoch if self.ledger.open(record) else None

    def _verify(self, coordinator: StoredCoordinator, report: UploadReport) -> None:
        chance = self.world.rng.random()
        if chance < 0.2:
            refusal = self.world.rng.choice([Refusal.UNREADABLE, Refusal.WRONG_SIZE])
            coordinator.machine.refuted(report, refusal, "by chance")
            return
        coordinator.machine.verified(
            report, Checkpoint(client=report.client, attempt=report.attempt, manifest_sha256="", files=1, bytes=1)
        )

    def _upload(self) -> None:
        for epoch, record in self.ledger.epochs().items():
            if record.phase is not EpochPhase.COOLDOWN or epoch in self.reported or self.name not in record.elected:
                continue
            if self.world.rng.random() < 0.1:
                self.reported.add(epoch)
                kind = self.world.rng.choice([ReportKind.UPLOADED, ReportKind.UPLOADED, ReportKind.FAILED])
                attempt = f"{self.world.rng.getrandbits(64):016x}"
                self.ledger.report(UploadReport(run=RUN, epoch=epoch, client=self.name, kind=kind, attempt=attempt))
