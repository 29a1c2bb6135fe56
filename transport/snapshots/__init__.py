"""Snapshots of the payloads that no model has consumed, beside the model's checkpoint. See docs/RESTART.md.

1. **The cut.** `snapshot` pins, in every ring of this host, each payload that is not consumed by all of its ranks
   (`SharedRingBuffer.hold_unread`). Between taking the record and the return of `snapshot` no trainer consumes. So
   what was written before is in the record or in the snapshot. A payload that is only claimed is not consumed.
2. **The upload.** A thread streams the pinned slots to the destination while training goes on, and lets go of each slot
   when its bytes are on their way. For each ring one file of payloads, one behind the other, and one index: ticket, due
   ranks, policy version. It is the cooldown's upload (`cooldown.upload.copied`), with SHA-256 of each block.
3. **The manifest** is written last. A snapshot without one does not exist. Rings of several hosts are parts, each taken
   on its host, once, under the name of one attempt; part 0 writes the manifest when all parts are there. An attempt is
   one cut: what is taken again after a failure has a new name.
4. **The way back.** `restore` verifies every byte that it needs, then writes the payloads into a ring of the new run,
   or its share of them. A payload keeps the id that it had first (`Ticket.origin`), by which records know it, so what a
   record has is not trained on again. Ranks that were done are done. By it a ring knows what it has had, too, so a call
   that failed is repeated.
5. What does not come back: how often a delivery was claimed in vain, and payloads that are named as parents.
"""

from transport.snapshots.listing import prune, steps
from transport.snapshots.manifest import Manifest, RingPart, new_attempt
from transport.snapshots.restoring import RestoredPayloads, Saved, restore
from transport.snapshots.taking import Snapshot, snapshot

__all__ = [
    "Manifest",
    "RestoredPayloads",
    "RingPart",
    "Saved",
    "Snapshot",
    "new_attempt",
    "prune",
    "restore",
    "snapshot",
    "steps",
]
