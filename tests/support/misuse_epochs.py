"""Scenes of what is recorded of runs and their epochs, and of where checkpoints go."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from misuse_scenes import Calls, Scene, nothing

from transport.cooldown import EpochRecord, Ledger
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.manifest import File
from transport.cooldown.epochs.records import Report, ReportKind
from transport.cooldown.epochs.shares import Saved, Share
from transport.rendezvous import Archive, Closing, Keys, Reason
from transport.store.memory import MemoryStore

RECORD = EpochRecord(run="run", epoch=1, destination="/tmp", cooldown_s=1.0, seed=1)
SET_RECORD = EpochRecord(
    run="run", epoch=1, destination="/tmp", cooldown_s=1.0, seed=1, clients=("a", "b"), hosts={"a": "h", "b": "h"}
)


@contextlib.contextmanager
def a_ledger() -> Iterator[Scene]:
    ledger = Ledger(MemoryStore(), "run")
    report = Report(run="run", epoch=1, client="a", kind=ReportKind.FAILED, detail="x")
    saved = Saved(member="a", host="h", folder="/tmp", files=(("model", 1),))
    share = Share(
        host="h", number=0, client="a", attempt="0" * 16, files=(File(name="model", size=1, sha256="0" * 64),)
    )
    calls: Calls = {
        "epochs": nothing,
        "look": lambda: {"epoch": 1},
        "watch": lambda: {"epoch": 1, "version": 0, "timeout_s": 0.0},
        "write": lambda: {"record": RECORD, "expected": ledger.look(1)[1]},
        "report": lambda: {"report": report},
        "reports": lambda: {"epoch": 1},
        "wait_for_report": lambda: {"epoch": 1, "version": -1, "timeout_s": 0.0},
        "decide": lambda: {"epoch": 1, "launch": "first"},
        "begin_save": lambda: {"epoch": 1, "member": "a", "process": "p"},
        "put_saved": lambda: {"epoch": 1, "saved": saved},
        "saved": lambda: {"epoch": 1, "host": "h"},
        "put_share": lambda: {"epoch": 1, "share": share},
        "shares": lambda: {"epoch": 1, "host": "h"},
        "beat": lambda: {"epoch": 1, "host": "h", "number": 0, "moved": 5},
        "beats": lambda: {"epoch": 1, "host": "h"},
        "wait_for_host": lambda: {"epoch": 1, "host": "h", "version": -1, "timeout_s": 0.0},
    }
    ledger.decide(2, "first")
    ledger.put_saved(2, saved)
    ledger.put_share(2, share)

    def intact() -> None:
        """What another epoch has recorded: the first word stands."""
        assert ledger.decide(2, "second") == "first"
        assert ledger.saved(2) == {"a": saved}
        assert ledger.shares(2) == [share]
        assert len(ledger.beats(1, "h")) <= 3

    yield Scene(ledger, calls, intact, close="")


@contextlib.contextmanager
def an_epoch_record() -> Iterator[Scene]:
    calls: Calls = {
        "elected_of": lambda: {"host": "h"},
        "members_of": lambda: {"host": "h"},
        "accepts": lambda: {"client": "a", "kind": ReportKind.FAILED},
    }
    yield Scene(SET_RECORD, calls, close="")


@contextlib.contextmanager
def an_archive() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as text:
        closing = Closing(reason=Reason.SUCCESS, round=1, incarnation="i", by="x")
        calls: Calls = {"read": nothing, "write": lambda: {"closing": closing}}
        yield Scene(Archive(Path(text) / "archive"), calls, close="")


@contextlib.contextmanager
def keys() -> Iterator[Scene]:
    calls: Calls = {
        "of_round": lambda: {"number": 1}, "slots": lambda: {"number": 1}, "roster": lambda: {"number": 1},
        "seat": lambda: {"number": 1, "slot": 0}, "place": lambda: {"number": 1, "slot": 0},
    }  # fmt: skip
    yield Scene(Keys("run"), calls, close="")


@contextlib.contextmanager
def a_destination() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as text, contextlib.closing(Folder(Path(text))) as folder:
        folder.put("a/b", b"12")
        again = itertools.count()
        calls: Calls = {
            "names": lambda: {"path": "a"}, "size": lambda: {"path": "a/b"}, "pieces": lambda: {"path": "a/b"},
            "writer": lambda: {"path": f"a/c{next(again)}", "size": 3}, "put": lambda: {"path": "a/d", "data": b"x"},
            "delete": lambda: {"path": "a/d"}, "read": lambda: {"path": "a/b", "most": 10},
            "settle": lambda: {"place": "a"}, "proofs": lambda: {"path": "a/b"},
            "publish": lambda: {"name": "x", "files": {"b": "a/b"}}, "unpublish": lambda: {"name": "x"},
            "leftovers": lambda: {"path": "a"}, "remove_leftover": lambda: {"path": "a/d"}, "close": nothing,
        }  # fmt: skip

        def intact() -> None:
            assert Folder(Path(text)).read("a/b", 10) == b"12"

        yield Scene(folder, calls, intact)
