"""A rank of a mesh for tests: `mesh_rank.py RINGS STORE DP TP RANK FOLDER GROUPS EVERY WIRES`.

It learns each step by noting its groups, with a checkpoint of notes and record every EVERY steps: accept, learn, store,
consume. Started again it goes on from its checkpoint. Its notes are what a test looks at: FOLDER/RANK.json.

A test that writes "ROLE POINT" into FOLDER/halt has the first rank of this role that comes to the point stop itself
(SIGSTOP): "planner", "other", or "any". The file's name is FOLDER/halted-RANK then. `points_of` names the points.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from transport import ClientOptions, Schema, Settings, Trainer, UpTo
from transport.packer.consumed_record import ConsumedRecord
from transport.store.base import Change, Entry, Store
from transport.store.open import open_store
from transport.training.mesh import Mesh
from transport.training.steps import Steps

SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))


class Halts:
    """The moments at which this rank stops itself, as a test says.

    Attributes:
        steps: of this rank, as soon as it has some.
    """

    steps: Steps | None = None

    def __init__(self, folder: Path, rank: int) -> None:
        self._asked = folder / "halt"
        self._rank = rank

    def at(self, point: str) -> None:
        """Stop this process where that is asked for, until it is continued or killed."""
        try:
            role, _, wanted = self._asked.read_text().partition(" ")
            mine = "planner" if self.steps is not None and self.steps.planner.leads else "other"
            if wanted != point or role not in (mine, "any"):
                return
            self._asked.rename(self._asked.with_name(f"halted-{self._rank}"))
        except FileNotFoundError:  # nobody asks, or another rank was faster
            return
        signal.raise_signal(signal.SIGSTOP)


def points_of(changes: Sequence[Change]) -> Iterator[str]:
    """Name what changes of a mesh's records are."""
    for key, value, *_ in changes:
        match key.split("/")[2:], None if value is None else msgspec.json.decode(value):
            case ["step", _], None:
                yield "forget"
            case ["step", _], _:
                yield "plan"
            case ["vote", _, _], str(vote):
                yield f"{vote} vote"
            case ["state", _], ["go" | "consumed" as state, *_]:
                yield state


class HaltingStore(Store):
    """A store in which this rank halts before and behind each change of its mesh, and behind looks at plans."""

    def __init__(self, store: Store, halts: Halts) -> None:
        self._store = store
        self._halts = halts

    def _get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        found = self._store.get_many(keys)
        if any("/part/" in key for key in keys):
            self._halts.at("reading")
        for key, entry in zip(keys, found, strict=True):
            if entry is not None and "consumed" in points_of([Change(key, entry.value)]):
                self._halts.at("seen consumed")
        return found

    def _scan(self, prefix: str) -> Mapping[str, Entry]:
        return self._store.scan(prefix) if prefix else {}

    def _put_many(self, changes: Sequence[Change]) -> list[int] | None:
        points = list(points_of(changes))
        for point in points:
            self._halts.at(f"before {point}")
        written = self._store.put_many(changes)
        for point in points if written is not None else []:
            self._halts.at(f"behind {point}")
        return written

    def _add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def _renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]:
        return self._store.renew(leases, lease_s)

    def _watch(self, key: str, version: int, timeout_s: float) -> Entry | None:
        return self._store.watch(key, version, timeout_s)

    def close(self) -> None:
        self._store.close()


def main(rings: str, mesh: Mesh, folder: Path, groups: int, every: int, wires: set[Any], halts: Halts) -> None:
    """Learn until the data has ended."""
    place = folder / f"{mesh.rank}.json"
    before: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {"steps": [], "record": ""}
    notes = before["steps"]
    record = ConsumedRecord.from_bytes(bytes.fromhex(before["record"])) if before["record"] else None

    def store(over: bool) -> None:
        """Store a checkpoint, whole or not at all."""
        new = place.with_suffix(".new")
        new.write_text(json.dumps({"steps": notes, "record": trainer.record.to_bytes().hex(), "over": over}))
        halts.at("before checkpoint")
        new.replace(place)
        halts.at("behind checkpoint")

    client = ClientOptions(settings=Settings(claim_lease_s=10.0))
    with Trainer(SCHEMA, rings, mesh=mesh, record=record, wire=wires, client=client) as trainer:
        steps = trainer.steps(groups, max_tokens=200, group_timeout_s=None)
        halts.steps = steps
        (folder / f"begun-{mesh.rank}-{os.getpid()}").touch()
        for step in steps:
            mine = [int(payload["tokens"][0]) for micro in step for payload in micro]
            step.accept()
            notes.append([step.number, step.groups, mine, len(step)])
            if len(notes) % every == 0:
                store(False)
                trainer.consume()
        store(True)
        trainer.consume()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    rings, url, dp, tp, rank, path, groups, every, wires = sys.argv[1:]
    folder = Path(path)
    halts = Halts(folder, int(rank))
    with HaltingStore(open_store(url), halts) as store:
        mesh = Mesh(int(dp), int(tp), int(rank), store=store)
        main(rings, mesh, folder, int(groups), int(every), set(wires.split(",")), halts)
