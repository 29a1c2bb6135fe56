"""Help for tests of programs that use this package: what leaked, and payloads without UCX.

with LocalTransport(schema) as local:             # no UCX, no service, no other process
    ticket = local.write({"obs": obs, "reward": 1.0})
    payload = local.client.read(ticket)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transport.testing.leaks import ResourceSnapshot, mark_descendants, run

if TYPE_CHECKING:
    from transport.testing.local import LocalTransport, a_ticket

__all__ = ["LocalTransport", "ResourceSnapshot", "a_ticket", "mark_descendants", "run"]

_HOMES = {"LocalTransport": "local", "a_ticket": "local"}


def __getattr__(name: str) -> Any:
    """Import on first use: who only looks for leaks needs no ring."""
    if name not in _HOMES:
        raise AttributeError(f"module 'transport.testing' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"transport.testing.{_HOMES[name]}"), name)
