"""A rank of a mesh for tests: `mesh_rank.py PREFIX STORE DP TP RANK FOLDER GROUPS EVERY WIRE`.

It learns each step by noting its groups, with a checkpoint of notes and record every EVERY steps: accept, learn, store,
consume. Started again it goes on from its checkpoint. Its notes are what a test looks at: FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transport import Schema, Trainer, UpTo
from transport.packer.consumed_record import ConsumedRecord
from transport.training.mesh import Mesh

SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))


def stored(place: Path, notes: list[Any], record: bytes, over: bool) -> None:
    """Store a checkpoint, whole or not at all."""
    new = place.with_suffix(".new")
    new.write_text(json.dumps({"steps": notes, "record": record.hex(), "over": over}))
    new.replace(place)


def main(prefix: str, mesh: Mesh, folder: Path, groups: int, every: int, wire: str) -> None:
    """Learn until the data has ended."""
    place = folder / f"{mesh.rank}.json"
    before = json.loads(place.read_text()) if place.exists() else {"steps": [], "record": ""}
    notes = before["steps"]
    record = ConsumedRecord.from_bytes(bytes.fromhex(before["record"])) if before["record"] else None
    with Trainer(SCHEMA, f"rings:{prefix}", mesh=mesh, record=record, wire={wire}) as trainer:  # type: ignore[arg-type]
        for step in trainer.steps(groups, max_tokens=200, group_timeout_s=None):
            mine = [int(payload["tokens"][0]) for micro in step for payload in micro]
            step.accept()
            notes.append([step.number, step.groups, mine, len(step)])
            if len(notes) % every == 0:
                stored(place, notes, trainer.record.to_bytes(), False)
                trainer.consume()
        stored(place, notes, trainer.record.to_bytes(), True)
        trainer.consume()


if __name__ == "__main__":
    prefix, store, dp, tp, rank, folder, groups, every, wire = sys.argv[1:]
    mesh = Mesh(int(dp), int(tp), int(rank), store=store)
    main(prefix, mesh, Path(folder), int(groups), int(every), wire)
