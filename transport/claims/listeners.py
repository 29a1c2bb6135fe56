"""Where each ring is served, as its listeners last said in WELCOME.

A listener that is started anew may get another port. Who found a ring by one address has the others from here, and so
has who asks for the outcomes of its claims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.client.connections.connection import Link
    from transport.client.connections.pool import PortKey


class Listeners:
    """What the listeners that one client was connected to have said. Belongs to its loop; others may look."""

    def __init__(self) -> None:
        self._ports: dict[str, tuple[int, ...]] = {}  # by ring
        self._rings: dict[PortKey, str] = {}

    def __repr__(self) -> str:
        return f"<Listeners of {len(self._ports)} rings>"

    def said(self, link: Link) -> None:
        """A listener has named its ring, and the ports (none: it does not say) at which that is served."""
        host, _ = link.port
        self._rings[link.port] = link.ring
        if link.ports:
            self._ports[link.ring] = link.ports
        for number in link.ports:
            self._rings.setdefault((host, number), link.ring)

    def ring_at(self, port: PortKey) -> str:
        """The ring that answered there last; where none has, one that is said to be served there. "": unknown."""
        return self._rings.get(port, "")

    def ports(self, ring: str) -> tuple[int, ...]:
        """Of this ring; none: no listener of it was met."""
        return self._ports.get(ring, ())
