"""Faults planted into the package, for the soak to find: each makes one promise false, in the soak's processes only.

    python benchmarks/soak --plant unfenced

`PLANTS` names for each what it changes (plant_changes.py), by module, and which figure of the report must show it.
points/sitecustomize.py makes the changes when a process imports the module; nothing of the package knows of them.
`mutations.py` runs them all.
"""

from __future__ import annotations

from typing import NamedTuple

from plant_changes import (
    Change,
    answers_are_lost,
    bytes_are_flipped,
    claims_are_dropped,
    dead_connections_hold,
    finishes_are_lost,
    freed_on_arrival,
    freed_on_send,
    generations_are_not_compared,
    no_ring_lingers,
    nothing_is_given_back,
    nothing_is_given_back_here,
    nothing_is_mapped,
    nothing_is_verified,
    only_over,
    outcomes_are,
    rings_begin_anew,
    segments_stay,
    takes_are_not_verified,
    trainers_fail,
    unfenced,
)


class Plant(NamedTuple):
    """One planted fault."""

    what: str
    shows: str  # the figure of the report that must not be 0 (or empty)
    changes: dict[str, Change]  # by module
    hides: str = ""  # a figure that must stay 0: what else guards against it still does
    queues: tuple[str, ...] = ("rings", "redis")  # with which it is a fault
    calm: bool = False  # without kills and stops, which would undo it


PLANTS = {
    "unfenced": Plant(
        "the queue accepts acknowledgements of claims that are another trainer's by now",
        "duplicated",
        {
            "transport.queue.redis": lambda module: unfenced(module.RedisQueue),
            "transport.claims.rings": lambda module: unfenced(module.FoundRings),
        },
    ),
    "finished-twice": Plant(
        "what a broken connection may not have finished counts as consumed, and another trainer's end of it as well",
        "duplicated",
        {
            "transport.claims.connection": finishes_are_lost,
            "transport.claims.outcomes": outcomes_are(True),
            "transport.packer.mixin": lambda module: only_over(module, "tcp"),
        },
        queues=("rings",),
    ),
    "outcome-forgotten": Plant(
        "the ring does not know what a connection that broke had finished",
        "lost",
        {
            "transport.claims.connection": answers_are_lost,
            "transport.claims.outcomes": outcomes_are(False),
            "transport.packer.mixin": lambda module: only_over(module, "tcp"),
        },
        queues=("rings",),
    ),
    "dead-connection": Plant(
        "the claims of a dead connection are its trainer's",
        "duplicated",
        {
            "transport.claims.connection": dead_connections_hold,
            "transport.packer.mixin": lambda module: only_over(module, "tcp"),
        },
        queues=("rings",),
    ),
    "kept-elsewhere": Plant(
        "what is given back is not, over the network",
        "lost",
        {
            "transport.claims.connection": nothing_is_given_back,
            "transport.packer.mixin": lambda module: only_over(module, "tcp"),
        },
        queues=("rings",),
        calm=True,
    ),
    "kept-here": Plant(
        "what is given back is not, in a mapped ring",
        "lost",
        {
            "transport.claims.mapped": nothing_is_given_back_here,
            "transport.packer.mixin": lambda module: only_over(module, "mapped"),
        },
        queues=("rings",),
        calm=True,
    ),
    "left-early": Plant(
        "a ring is left when its writer has ended, with what is unread in it",
        "lost",
        {
            "transport.server.lifetime": no_ring_lingers,
            "transport.packer.mixin": lambda module: only_over(module, "tcp"),  # who maps a ring keeps it, too
        },
    ),
    "dropped": Plant(
        "payloads without a deadline are discarded as if it had passed",
        "lost",
        {"transport.packer.claims": claims_are_dropped},
    ),
    "freed-on-arrival": Plant(
        "a slot is acknowledged when its payload has arrived, not when it was consumed",
        "lost",
        {"transport.packer.mixin": freed_on_arrival},
        queues=("redis",),  # with the rings as the queue the claim keeps it
    ),
    "freed-on-send": Plant(
        "a slot is freed when it was sent",
        "lost",
        {"transport.packer.rollout": freed_on_send},
    ),
    "begun-anew": Plant(
        "a restarted writer makes a new ring instead of taking over the old one",
        "lost",
        {"transport.ring.buffer": rings_begin_anew},
    ),
    "no-generation": Plant(
        "a ticket names a slot and no generation",
        "wrong",
        {"transport.client.client": generations_are_not_compared},
        queues=("redis",),
    ),
    "flipped": Plant(
        "bytes change in the ring; over wires, the checksum keeps them from being consumed",
        "lost",
        {"transport.ring.buffer": bytes_are_flipped, "transport.packer.mixin": nothing_is_mapped},
        hides="wrong",
    ),
    "flipped-unverified": Plant(
        "bytes change in the ring, and no checksum is compared",
        "wrong",
        {
            "transport.ring.buffer": bytes_are_flipped,
            "transport.ticket": nothing_is_verified,
            "transport.claims.connection": takes_are_not_verified,
        },
    ),
    "unverified": Plant(
        "no checksum of a payload is compared",
        "wrong",
        {"transport.ticket": nothing_is_verified, "transport.claims.connection": takes_are_not_verified},
        queues=(),  # a fault where bytes change on the way: network.py
    ),
    "segments-stay": Plant(
        "a writer leaves a segment behind",
        "left_behind",
        {"transport.packer.rollout": segments_stay},
    ),
    "trainers-fail": Plant(
        "a trainer ends by itself",
        "crashes",
        {"transport.packer.mixin": trainers_fail},
    ),
}
