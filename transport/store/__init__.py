"""Small records with versions and leases: what rendezvous, the directory and cooldown stand on."""

from transport.store.base import ABSENT, Change, Entry, Store
from transport.store.open import open_store
from transport.store.redis import RedisStore
from transport.store.sqlite import SQLiteStore

__all__ = ["ABSENT", "Change", "Entry", "RedisStore", "SQLiteStore", "Store", "open_store"]
