"""Whatever happens, an epoch that was recorded as checkpointed can be restored bit-exact, and its end is for good.

Real files, a real store, the real coordinator; the order of events, faults and restarts is Hypothesis's.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from properties import examples

from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.coordinator import MOST_GAP_S, StoredCoordinator
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.manifest import FILES
from transport.cooldown.epochs.records import (
    Checkpoint,
    EpochRecord,
    Outcome,
    Phase,
    ReportKind,
    UploadReport,
    upload_folder,
)
from transport.cooldown.restoring import restore
from transport.cooldown.upload import Stop, Uploaded, remove, upload
from transport.cooldown.verify import RefusedUpload, verified
from transport.errors import DestinationError, UploadCancelledError
from transport.store.sqlite import SQLiteStore

CLIENTS = tuple("abcdef")
MODEL = {"a": b"first file", "b/c": bytes(range(256)) * 8, "d": b""}
LIMIT_S = 60.0

names = st.sampled_from([*CLIENTS, "stranger"])
nearly = st.sampled_from([True, True, True, False])


class Cooldowns(RuleBasedStateMachine):
    """One epoch; clients upload, fail, lie and report as they like, and coordinators come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="cooldown-"))
        (self.path / "destination").mkdir()
        for name, data in MODEL.items():
            (self.path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / "model" / name).write_bytes(data)
        self.destination = Folder(self.path / "destination")
        self.store = SQLiteStore(self.path / "store.sqlite3")
        self.ledger = Ledger(self.store, "run")
        self.uploads: dict[tuple[str, str], Uploaded] = {}
        self.reported: set[tuple[str, str]] = set()
        self.due: list[UploadReport] = []
        self.verdicts: list[tuple[UploadReport, Checkpoint | RefusedUpload]] = []
        self.now = 0.0
        self.watched = 0.0
        self.end: EpochRecord | None = None
        self.coordinators: list[StoredCoordinator] = []

    @initialize(seed=st.integers(0, 2**64 - 1), epoch=st.integers(1, 99))
    def begin(self, seed: int, epoch: int) -> None:
        self.epoch = epoch
        record = EpochRecord(run="run", epoch=epoch, destination=self.destination.url, cooldown_s=LIMIT_S, seed=seed)
        assert self.ledger.open(record)
        self.coordinators = [StoredCoordinator(self.ledger, epoch)]
        self.coordinators[0].machine.begin(5, CLIENTS)
        self.coordinators[0].write()

    # --- clients --------------------------------------------------------------------------------------
    def chosen(self, client: str, elected: bool) -> str:
        """The client, or mostly one of those that are elected in its place."""
        among = self.coordinators[0].machine.record.elected
        return among[ord(client[0]) % len(among)] if elected else client

    @rule(client=names, elected=nearly, attempt=st.integers(0, 1), stops_at=st.none() | st.integers(0, 3), this=nearly)
    def upload(self, client: str, elected: bool, attempt: int, stops_at: int | None, this: bool) -> None:
        """Perhaps called off after some files; perhaps for an epoch before."""
        client, older = self.chosen(client, elected), not this
        name = f"{attempt:016x}"
        if (client, name) in self.uploads:
            return
        stop = Stop()
        record = EpochRecord(run="run", epoch=self.epoch - older, step=5, destination="", cooldown_s=1.0, seed=0)

        def progress(done: int, files: int, size: int) -> None:
            if stops_at is not None and done >= stops_at:
                stop.set()

        try:
            done = upload(self.path / "model", self.destination, record, client, name, stop=stop, progress=progress)
        except UploadCancelledError:
            assert stops_at is not None
            assert not (self.destination.root / upload_folder("run", record.epoch, f"{client}/{name}")).exists()
        else:
            self.uploads[client, name] = done

    @rule(data=st.data(), how=st.sampled_from(["missing", "size", "content", "manifest"]))
    @precondition(lambda self: self.uploads)
    def damage(self, data: st.DataObject, how: str) -> None:
        """Before it was reported with its checksum. Later damage cannot be prevented; `restore` finds it."""
        client, attempt = data.draw(st.sampled_from(sorted(self.uploads)))
        if (client, attempt) in self.reported:
            return
        place = self.destination.root / upload_folder("run", self.epoch, f"{client}/{attempt}")
        target = place / ("manifest.json" if how == "manifest" else f"{FILES}/b/c")
        if not target.exists():
            return
        content = target.read_bytes()
        match how:
            case "missing":
                target.unlink()
            case "size":
                target.write_bytes(content[:-1])
            case _:
                target.write_bytes(b"\x01" + content[1:])

    @rule(client=names, elected=nearly, attempt=st.integers(0, 1), true=nearly, uploaded=nearly)
    def report(self, client: str, elected: bool, attempt: int, true: bool, uploaded: bool) -> None:
        client, lies = self.chosen(client, elected), not true
        kind = ReportKind.UPLOADED if uploaded else ReportKind.FAILED
        name = f"{attempt:016x}"
        done = self.uploads.get((client, name))
        sha256 = done.sha256 if done is not None and not lies else "0" * 64
        if not lies:
            self.reported.add((client, name))
        self.ledger.report(
            UploadReport(run="run", epoch=self.epoch, client=client, kind=kind, attempt=name, manifest_sha256=sha256)
        )

    @rule(client=st.sampled_from(CLIENTS), attempt=st.integers(0, 1), true=nearly)
    def complete(self, client: str, attempt: int, true: bool) -> None:
        """An elected client does all that it should."""
        self.upload(client=client, elected=True, attempt=attempt, stops_at=None, this=True)
        self.report(client=client, elected=True, attempt=attempt, true=true, uploaded=True)

    @rule(client=names, attempt=st.integers(0, 1))
    def tidy(self, client: str, attempt: int) -> None:
        """As clients do after the end: what did not win is removed."""
        record, _ = self.ledger.look(self.epoch)
        assert record is not None
        name = f"{attempt:016x}"
        if record.phase is Phase.ENDED and (record.checkpoint is None or record.checkpoint.attempt != name):
            remove(self.destination, upload_folder("run", self.epoch, f"{client}/{name}"))

    # --- coordinators -----------------------------------------------------------------------------------
    @rule(which=st.integers(0, 1), passes=st.floats(-20, 20) | st.floats(-1e9, 1e9))
    def step(self, which: int, passes: float) -> None:
        """Time passes, or the clock steps."""
        coordinator = self.coordinators[which % len(self.coordinators)]
        self.now += passes
        before = coordinator.machine.elapsed_s
        self.due += coordinator.step(self.now)
        assert 0 <= coordinator.machine.elapsed_s - before <= MOST_GAP_S + coordinator.machine.record.cooldown_s

    @rule(data=st.data(), vanished=st.booleans())
    @precondition(lambda self: self.due)
    def verify(self, data: st.DataObject, vanished: bool) -> None:
        self.verify_one(self.due.pop(data.draw(st.integers(0, len(self.due) - 1))), vanished)

    def verify_one(self, report: UploadReport, vanished: bool) -> None:
        record, _ = self.ledger.look(self.epoch)
        assert record is not None
        root = self.destination.root
        if vanished:
            root.rename(root.with_name("away"))
        try:
            self.verdicts.append((report, verified(self.destination, record, report)))
        except RefusedUpload as untrue:
            self.verdicts.append((report, untrue))
        finally:
            if vanished:
                root.with_name("away").rename(root)

    @rule(data=st.data(), which=st.integers(0, 1))
    @precondition(lambda self: self.verdicts)
    def conclude(self, data: st.DataObject, which: int) -> None:
        verdict = self.verdicts.pop(data.draw(st.integers(0, len(self.verdicts) - 1)))
        self.tell(self.coordinators[which % len(self.coordinators)], *verdict)

    def tell(self, coordinator: StoredCoordinator, report: UploadReport, verdict: Checkpoint | RefusedUpload) -> None:
        if isinstance(verdict, Checkpoint):
            coordinator.machine.verified(report, verdict)
        else:
            coordinator.machine.refuted(report, verdict.refusal, str(verdict))
        self.due += coordinator.write()

    @rule(which=st.integers(0, 1), there=nearly)
    def work_off(self, which: int, there: bool) -> None:
        """A coordinator that does all that is due."""
        coordinator = self.coordinators[which % len(self.coordinators)]
        self.due += coordinator.step(self.now)
        while self.due:
            self.verify_one(self.due.pop(), vanished=not there)
            self.tell(coordinator, *self.verdicts.pop())

    @rule(replaces=st.booleans())
    def restart(self, replaces: bool) -> None:
        """A coordinator more, or another in place of one that was killed."""
        if replaces or len(self.coordinators) > 1:
            self.coordinators.pop(0)
        self.coordinators.append(StoredCoordinator(self.ledger, self.epoch))

    # --- what holds -------------------------------------------------------------------------------------
    @invariant()
    def an_end_is_for_good_and_true(self) -> None:
        if not self.coordinators:
            return
        record, _ = self.ledger.look(self.epoch)
        assert record is not None
        if self.end is not None:
            assert record == self.end
        elif record.phase is Phase.ENDED:
            self.end = record
            assert record.outcome in (Outcome.CHECKPOINTED, Outcome.TIMED_OUT)
            assert (record.outcome is Outcome.CHECKPOINTED) == (record.checkpoint is not None)
            if record.checkpoint is None:
                assert record.elapsed_s >= LIMIT_S
            else:
                assert record.checkpoint.client in record.elected

    def teardown(self) -> None:
        try:
            if self.end is not None and self.end.outcome is Outcome.CHECKPOINTED:
                restored = restore(self.end, self.destination, self.path / "restored")
                assert {name: path.read_bytes() for name, path in restored.files.items()} == MODEL
        except DestinationError as error:
            raise AssertionError("a checkpoint cannot be read") from error
        finally:
            self.store.close()
            shutil.rmtree(self.path)


TestCooldowns = Cooldowns.TestCase
TestCooldowns.settings = examples(15, stateful_step_count=40)
