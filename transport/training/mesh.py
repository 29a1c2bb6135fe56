"""Mesh: the ranks that train one model together, by their numbers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from transport.errors import UsageError
from transport.runtime.arguments import at_least
from transport.runtime.hiding import hiding

if TYPE_CHECKING:
    from transport.store.base import Store


@hiding("store")
class Mesh(msgspec.Struct, frozen=True):
    """The ranks of one model: ``dp`` data-parallel replicas of ``tp`` ranks each.

    All ranks of a replica get the same payloads. Ranks are numbered replica by replica, as torch's
    ``init_device_mesh("cuda", (dp, tp))`` numbers them.

    Attributes:
        dp: replicas, which divide the groups of a step.
        tp: ranks of a replica: tensor, pipeline and context parallel ones together.
        rank: of this process, 0 to dp x tp - 1.
        name: of the mesh in its store; the same at each start.
        store: of the mesh's records, or its text (``"sqlite:///path"``, ``"redis://host:6379/0?run=NAME"``). None:
            that of the rings' directory.
    """

    dp: int = 1
    tp: int = 1
    rank: int = 0
    name: str = "trainer"
    store: Any = None  # Store | str | None

    def __post_init__(self) -> None:
        at_least(1, self.dp, "dp")
        at_least(1, self.tp, "tp")
        if not 0 <= at_least(0, self.rank, "rank") < self.ranks:
            raise UsageError(f"rank={self.rank}: a mesh of {self.dp} x {self.tp} has the ranks 0 to {self.ranks - 1}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp

    @property
    def replica(self) -> int:
        """Number of this rank's replica."""
        return self.rank // self.tp

    @classmethod
    def of_torchrun(cls, tp: int = 1, *, name: str = "trainer", store: Store | str | None = None) -> Mesh:
        """Return the mesh of all processes that torchrun has started, by RANK and WORLD_SIZE of the environment."""
        try:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError):
            raise UsageError(
                "RANK and WORLD_SIZE are not set: start with torchrun, or give Mesh(dp, tp, rank)"
            ) from None
        if world % at_least(1, tp, "tp"):
            raise UsageError(f"tp={tp} does not divide the {world} processes of WORLD_SIZE")
        return cls(world // tp, tp, rank, name, store)

    @classmethod
    def of(
        cls,
        device_mesh: Any,
        data: str | tuple[str, ...] = "dp",
        *,
        name: str = "trainer",
        store: Store | str | None = None,
    ) -> Mesh:
        """Return the mesh of a torch ``DeviceMesh``.

        Args:
            data: names of the dimensions along which the data is divided; ranks along the others get the same payloads.
        """
        names: tuple[str, ...] = tuple(device_mesh.mesh_dim_names or ())
        divided = (data,) if isinstance(data, str) else data
        if not set(divided) <= set(names):
            raise UsageError(f"data={data!r}: the dimensions of this DeviceMesh are {', '.join(names) or 'not named'}")
        shape, place = tuple(device_mesh.mesh.shape), device_mesh.get_coordinate()
        if place is None:
            raise UsageError("this process is not in the DeviceMesh")
        replicas, replica, ranks, rank = 1, 0, 1, 0
        for name_of, size, at in zip(names, shape, place, strict=True):
            if name_of in divided:
                replicas, replica = replicas * size, replica * size + at
            else:
                ranks, rank = ranks * size, rank * size + at
        return cls(replicas, ranks, replica * ranks + rank, name, store)
