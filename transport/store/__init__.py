"""Small shared records with versions and leases: what rendezvous, the directory and cooldown stand on."""

from transport.store.base import Change, Entry, Store

__all__ = ["Change", "Entry", "Store"]
