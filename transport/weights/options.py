"""EngineOptions: how one member's engine of weights is made, beyond what most users choose."""

from __future__ import annotations

import msgspec

from transport.runtime.hiding import hiding
from transport.weights.plan import topology
from transport.weights.plan.topology import Shape
from transport.wires import Wire


@hiding("secret")
class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a `WeightsEngine`; ``host``, ``wires``, ``in_flight`` and ``rate`` may differ between members.

    Attributes:
        shape, fanout: of the relays; the trainer's count.
        host: members with the same one can map this member's memory; None: those of this host, /dev/shm and user.
        wires: what may carry buckets; None: whatever is best, mapped on one host.
        secret: shared secret that members prove to each other's listeners; every member has the same.
        in_flight: buckets under way at once; None: 8, without a layout 2.
        rate: bytes per second over this member's link to all that pull from it over a wire; None: no limit.
        stall_s: a child that holds a bucket longer than this while the sender waits is dropped.
        join_s: longest wait for the other members of a group to connect; a manager's own limit may be shorter.
        prefix: begins the random names of its segments, so that another process can remove those of a killed member.
    """

    shape: Shape = "tree"
    fanout: int = topology.FANOUT
    host: str | None = None
    wires: frozenset[Wire] | None = None
    secret: bytes | None = None
    in_flight: int | None = None
    rate: float | None = None
    stall_s: float = 60.0
    join_s: float = 600.0
    prefix: str = ""
