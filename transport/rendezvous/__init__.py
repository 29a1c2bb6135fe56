"""Membership of a run: rounds, ranks, hot spares, and an end that all members learn."""

from transport.rendezvous.closing import Archive, close_run
from transport.rendezvous.records import Closing, Keys, Place, Reason, Role, Roster
from transport.rendezvous.rendezvous import Rendezvous
from transport.rendezvous.rules import ExitCodes, Rules

__all__ = [
    "Archive",
    "Closing",
    "ExitCodes",
    "Keys",
    "Place",
    "Reason",
    "Rendezvous",
    "Role",
    "Roster",
    "Rules",
    "close_run",
]
