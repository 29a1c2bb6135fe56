"""Every default of the transport in one place, with the inequalities that must hold between them."""

from __future__ import annotations

import math
import operator
from typing import Literal

import msgspec

from transport.errors import ConfigurationError

LogFormat = Literal["text", "json"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

# The reference's names, kept because users look for them.
_PORT_QUARANTINE_SEC = 30.0
_POOL_ENDPOINT_MAX_AGE_S = 100.0
_MAX_FETCH_ROUNDS = 3

_MAY_BE_ZERO = frozenset({"linger_s"})  # times that nothing counts in, or divides by


_READ_TIMEOUT_S = 5.0


class OperatorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times and bounds that depend on hosts and links: the part of `Settings` that an operator configures."""

    # one attempt to read: a constant plus the payload at the slowest rate that is still normal
    read_timeout_s: float = _READ_TIMEOUT_S
    read_slowest_rate: float = 100e6
    batch_deadline_s: float = 300.0
    linger_s: float = 300.0
    claim_lease_s: float = 60.0
    connections_per_listener: int = 1024
    consumed_rings: int = 4096
    staging_bytes: int = 512 << 20


class Settings(OperatorSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times in seconds, sizes in bytes, rates in bytes per second."""

    connect_timeout_s: float = _READ_TIMEOUT_S
    handshake_timeout_s: float = _READ_TIMEOUT_S

    # layer 1: attempts inside one read; layer 2: calls per ticket; layer 3: rounds per batch
    attempts_per_read: int = 2
    calls_per_ticket: int = 2
    rounds_per_batch: int = _MAX_FETCH_ROUNDS
    # long enough that the attempts of a batch outlast the second in which a killed listener is started again
    backoff_first_s: float = 0.25
    backoff_most_s: float = 4.0

    port_quarantine_s: float = _PORT_QUARANTINE_SEC
    port_quarantine_most_s: float = 8 * _PORT_QUARANTINE_SEC
    pool_endpoint_max_age_s: float = _POOL_ENDPOINT_MAX_AGE_S
    pool_endpoints_per_port: int = 8
    pool_endpoints_idle: int = 256
    handshakes_per_host: int = 256
    # of a listener process beside the ring's memory; a connection over shared memory takes about 1 MB
    listener_memory_bytes: int = 2 << 30
    listener_idle_eviction_s: float = 120.0

    ack_delay_s: float = 0.005
    ack_timeout_s: float = 30.0
    watchdog_s: float = 10.0
    heartbeat_s: float = 1.0

    inline_limit: int = 65536
    records_per_message: int = 63

    @classmethod
    def derived(cls, operator: OperatorSettings) -> Settings:
        """Return the settings of an operator's configuration; connecting may take as long as an answer."""
        chosen = {name: getattr(operator, name) for name in OperatorSettings.__struct_fields__}
        return cls(**chosen, connect_timeout_s=operator.read_timeout_s, handshake_timeout_s=operator.read_timeout_s)

    def read_timeout(self, size: int) -> float:
        """Longest time one attempt at a payload of ``size`` bytes may take."""
        try:
            size = operator.index(size)
        except TypeError:
            raise ConfigurationError(
                f"a payload's size is a whole number of bytes, not a {type(size).__name__}"
            ) from None
        return self.read_timeout_s + size / self.read_slowest_rate

    def validate(self) -> Settings:
        """Return self, or raise ConfigurationError naming the first rule that does not hold."""
        if broken := self.broken_rule():
            raise ConfigurationError(broken)
        return self

    def broken_rule(self) -> str:
        """Return the first rule that does not hold, with the names of its settings; "": all hold."""
        for name in self.__struct_fields__:
            value, may_be_zero = getattr(self, name), name in _MAY_BE_ZERO
            if not (0 < value < math.inf or (may_be_zero and value == 0)):
                return f"{name}={value:g}: give a finite number {'of at least' if may_be_zero else 'above'} 0"
        broken = next((rule for holds, rule in self._rules() if not holds), "")
        return broken and f"settings contradict each other: {broken} must hold"

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (self.read_timeout(0) < self.batch_deadline_s, "read_timeout_s < batch_deadline_s"),
            (
                self.pool_endpoint_max_age_s < self.listener_idle_eviction_s,
                "pool_endpoint_max_age_s < listener_idle_eviction_s",
            ),
            (self.port_quarantine_s <= self.port_quarantine_most_s, "port_quarantine_s <= port_quarantine_most_s"),
            (
                self.pool_endpoints_per_port <= self.pool_endpoints_idle,
                "pool_endpoints_per_port <= pool_endpoints_idle",
            ),
            (self.ack_delay_s * 100 <= self.ack_timeout_s, "ack_delay_s * 100 <= ack_timeout_s"),
            (self.heartbeat_s * 3 <= self.watchdog_s, "heartbeat_s * 3 <= watchdog_s"),
            (self.backoff_first_s <= self.backoff_most_s, "backoff_first_s <= backoff_most_s"),
            (2 <= self.records_per_message <= 63, "2 <= records_per_message <= 63"),
            # the payloads joined to one message are counted in 32 bits
            (self.inline_limit * 63 < 2**32, "inline_limit * 63 < 2**32"),
        ]


DEFAULTS = Settings().validate()
