"""Every default, and the inequalities between them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from transport.errors import ConfigurationError
from transport.settings import (
    _MAX_FETCH_ROUNDS,
    _POOL_ENDPOINT_MAX_AGE_S,
    _PORT_QUARANTINE_SEC,
    DEFAULTS,
    Settings,
)


def test_the_defaults_are_those_of_the_protocol() -> None:
    assert _PORT_QUARANTINE_SEC == DEFAULTS.port_quarantine_s == 30
    assert _POOL_ENDPOINT_MAX_AGE_S == DEFAULTS.pool_endpoint_max_age_s == 100
    assert _MAX_FETCH_ROUNDS == DEFAULTS.rounds_per_batch == 3
    assert (DEFAULTS.attempts_per_read, DEFAULTS.calls_per_ticket) == (2, 2)
    assert DEFAULTS.listener_idle_eviction_s == 120
    assert (DEFAULTS.ack_delay_s, DEFAULTS.ack_timeout_s) == (0.005, 30)
    assert DEFAULTS.batch_deadline_s == 300
    assert DEFAULTS.claim_lease_s == 60
    assert DEFAULTS.linger_s == 300
    assert (DEFAULTS.handshake_timeout_s, DEFAULTS.connections_per_listener) == (5, 1024)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"batch_deadline_s": 5.0}, "read_timeout_s < batch_deadline_s"),
        ({"pool_endpoint_max_age_s": 120.0}, "pool_endpoint_max_age_s < listener_idle_eviction_s"),
        ({"port_quarantine_s": 250.0}, "port_quarantine_s <= port_quarantine_most_s"),
        ({"pool_endpoints_per_port": 300}, "pool_endpoints_per_port <= pool_endpoints_idle"),
        ({"ack_delay_s": 1.0}, "ack_delay_s * 100 <= ack_timeout_s"),
        ({"heartbeat_s": 4.0}, "heartbeat_s * 3 <= watchdog_s"),
        ({"backoff_first_s": 5.0}, "backoff_first_s <= backoff_most_s"),
        ({"records_per_message": 64}, "2 <= records_per_message <= 63"),
        ({"inline_limit": (1 << 32) // 63 + 1}, "inline_limit * 63 < 2**32"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_the_rule(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        msgspec.structs.replace(DEFAULTS, **change).validate()
    assert str(caught.value) == f"settings contradict each other: {rule} must hold"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ack_delay_s": 0.0}, "ack_delay_s=0"),
        ({"ack_timeout_s": math.inf}, "ack_timeout_s=inf"),
    ],
)
def test_a_setting_that_is_not_above_zero_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        msgspec.structs.replace(DEFAULTS, **change).validate()
    assert str(caught.value) == f"{says}: give a finite number above 0"


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_listeners_may_linger_for_no_time_but_not_for_less_or_for_ever(value: float) -> None:
    assert msgspec.structs.replace(DEFAULTS, linger_s=0.0).validate().linger_s == 0
    with pytest.raises(ConfigurationError, match=r"linger_s=.*: give a finite number of at least 0"):
        msgspec.structs.replace(DEFAULTS, linger_s=value).validate()


def test_unknown_settings_are_errors() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `read_timeuot_s`"):
        msgspec.json.decode(b'{"read_timeuot_s": 1}', type=Settings)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        DEFAULTS.ack_delay_s = 1.0  # type: ignore[misc]
