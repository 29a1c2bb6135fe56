"""Port quarantine: which port to try next. Decisions only; the clock is an argument.

    healthy ──failed──► quarantined ──time runs out──► on probation ──begin──► probed
       ▲                    ▲    (a failure meanwhile renews)                    │ │
       │                    └──────────── failed: twice as long ─────────────────┘ │
       └────────────────────────────── succeeded (from any state) ────────────────┘

A quarantined port is still used as a last resort: if no healthy port remains, the one whose quarantine ends soonest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transport.client.pool import PortKey
from transport.settings import _PORT_QUARANTINE_SEC, DEFAULTS, Settings

__all__ = ["_PORT_QUARANTINE_SEC", "PortQuarantine"]


@dataclass(slots=True)
class _Entry:
    until: float
    length_s: float
    probing: bool = False


class PortQuarantine:
    """Remembers ports that produced a transport error (reset, truncated, unreachable, timeout).

    The first failure costs ``port_quarantine_s``. When that has run out, the next use is the probe: success
    heals, failure doubles the time, up to ``port_quarantine_most_s`` (below the default ``linger_s``, so that a port
    that comes back is found while payloads are still served). A failure *during* the quarantine renews it but doubles
    nothing, because it says only that the port was used for want of a better one, or that several reads
    were under way when it broke.

    Memory: a port is forgotten when it was not used for ``port_quarantine_most_s`` after its quarantine ran
    out, so that ports of long-gone servers do not accumulate. Owned by one thread.
    """

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._first_s = settings.port_quarantine_s
        self._most_s = settings.port_quarantine_most_s
        # A probe that is neither succeeded nor failed (cancelled) is over after the longest time that an attempt
        # at a small payload takes; then another use may be the probe.
        self._probe_s = settings.connect_timeout_s + settings.handshake_timeout_s + settings.read_timeout(0)
        # Invariant: a port that is not in here is healthy.
        self._entries: dict[PortKey, _Entry] = {}

    def __repr__(self) -> str:
        ports = ", ".join(f"{address}:{port}" for address, port in self._entries)
        return f"<PortQuarantine {ports or 'empty'}>"

    def __bool__(self) -> bool:
        """Whether any port is remembered; where none is, there is nothing to ask."""
        return bool(self._entries)

    def is_quarantined(self, port: PortKey, now: float) -> bool:
        """Whether the port is to be avoided now. A port on probation is not."""
        entry = self._entries.get(port)
        return entry is not None and now < entry.until

    def quarantined(self, now: float) -> list[PortKey]:
        """The ports to be avoided now."""
        return [port for port, entry in self._entries.items() if now < entry.until]

    def order(self, ports: Sequence[PortKey], now: float, start: int = 0) -> list[PortKey]:
        """All of ``ports``, each once, in the order in which to try them.

        Healthy ports and ports on probation come first, in the order given, beginning at ``start`` (any number; callers
        increment it to spread load); then quarantined ones, the one whose quarantine ends soonest first.
        """
        distinct = list(dict.fromkeys(ports))
        if distinct:
            start %= len(distinct)
        rotated = distinct[start:] + distinct[:start]
        healthy = [port for port in rotated if not self.is_quarantined(port, now)]
        avoided = [port for port in rotated if self.is_quarantined(port, now)]
        return healthy + sorted(avoided, key=lambda port: self._entries[port].until)

    def begin(self, port: PortKey, now: float) -> bool:
        """Call before using a port. True if this use is the probe; others then avoid the port until it is decided."""
        entry = self._entries.get(port)
        if entry is None or now < entry.until:
            return False
        entry.probing = True
        entry.until = now + self._probe_s
        return True

    def failed(self, port: PortKey, now: float) -> None:
        """The port produced a transport error."""
        entry = self._entries.get(port)
        if entry is None:
            self._forget_old(now)
            self._entries[port] = _Entry(now + self._first_s, self._first_s)
            return
        if entry.probing or now >= entry.until:
            entry.length_s = min(2 * entry.length_s, self._most_s)
            entry.probing = False
        entry.until = now + entry.length_s

    def succeeded(self, port: PortKey) -> None:
        """The port answered; a refusal is an answer, too."""
        self._entries.pop(port, None)

    def _forget_old(self, now: float) -> None:
        old = [port for port, entry in self._entries.items() if now - entry.until > self._most_s]
        for port in old:
            del self._entries[port]
