"""The store in memory, by the name under which tests import it."""

from transport.store.memory import MemoryStore

__all__ = ["MemoryStore"]
