"""Every setting does something: set by its variable in the environment, it changes what is observed here.

Each key has two values and what is seen with each, in decisions that have clocks and sizes as arguments, or in a
process with real endpoints. A key without an entry fails a test. `test_config.py` has which source of a value wins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import settings_with
from memory_store import MemoryStore
from packers import Packer
from seen_here import address_of_metrics, logged, of_a_worker, server_of, store_of_a_command, wire_of_a_payload
from seen_settings import (
    attempts_at_a_dead_port,
    calls_and_rounds,
    deadline_of_a_read,
    delay_of_an_ack,
    expiry_of_an_idle_connection,
    handshakes_admitted,
    idle_connection_is_closed,
    idle_connections,
    limit_of_a_large_read,
    limit_of_a_small_read,
    limits_of_a_connection,
    longest_pause_before_an_ack_is_sent_again,
    pause_between_renewals,
    pause_of_the_sweep,
    phase_of_a_server_without_its_writer,
    places_of_a_port,
    quarantined_for,
    renewed_anew_by_memory,
    rings_remembered,
    staging_pool,
    tickets_of_one_message,
    turned_away,
    unacknowledged_attempts_end,
    waits,
    whether_a_claim_is_somebody_elses_after,
    whether_a_silent_listener_counts_as_stopped,
)

from transport import Schema, UCXXRolloutMixin, config
from transport.queue.group import GroupQueue
from transport.server.lifetime import Phase
from transport.storage.urls import SQLiteURL
from transport.testing import MemoryQueue

Configuration = config.Configuration
PORT, OTHER = ("127.0.0.1", 1), ("127.0.0.1", 2)
SCHEMA = Schema.of(step=("int64",))


class Worker(UCXXRolloutMixin): ...


Seen = Callable[[Configuration], Any]
# key → what is looked at; two values as text, each with what is seen; other settings that make it visible
EFFECTS: dict[str, tuple[Seen, dict[str, Any], dict[str, str]]] = {
    "read_timeout_s": (limit_of_a_small_read, {"0.1": "0.1 s", "0.3": "0.3 s"}, {"attempts_per_read": "1"}),
    "read_slowest_rate": (
        limit_of_a_large_read, {"1e7": "0.2 s", "1e9": "0.1 s"}, {"read_timeout_s": "0.1", "attempts_per_read": "1"}
    ),
    "connect_timeout_s": (limits_of_a_connection, {"3": (3.0, 8), "4": (4.0, 9)}, {}),
    "handshake_timeout_s": (limits_of_a_connection, {"7": (5.0, 12), "6": (5.0, 11)}, {}),
    "attempts_per_read": (attempts_at_a_dead_port, {"1": 1, "3": 3}, {"backoff_first_s": "0.001"}),
    "calls_per_ticket": (
        calls_and_rounds, {"1": (3, 3), "4": (12, 3)}, {"backoff_first_s": "0.001", "backoff_most_s": "0.002"}
    ),
    "rounds_per_batch": (
        calls_and_rounds, {"1": (2, 1), "2": (4, 2)}, {"backoff_first_s": "0.001", "backoff_most_s": "0.002"}
    ),
    "batch_deadline_s": (
        deadline_of_a_read, {"0.5": False, "100": True},
        {"attempts_per_read": "50", "backoff_first_s": "0.05", "backoff_most_s": "0.05", "read_timeout_s": "0.1"},
    ),
    "backoff_first_s": (waits, {"0.5": (0.5, 4.0), "1": (1.0, 4.0)}, {}),
    "backoff_most_s": (waits, {"2": (0.25, 2.0), "3": (0.25, 3.0)}, {}),
    "port_quarantine_s": (quarantined_for, {"10": (10, 240), "20": (20, 240)}, {}),
    "port_quarantine_most_s": (quarantined_for, {"60": (30, 60), "120": (30, 120)}, {}),
    "pool_endpoint_max_age_s": (expiry_of_an_idle_connection, {"50": 60.0, "20": 30.0}, {}),
    "pool_endpoints_per_port": (places_of_a_port, {"1": 1, "8": 2}, {}),
    "pool_endpoints_idle": (idle_connections, {"2": 2, "3": 3}, {"pool_endpoints_per_port": "2"}),
    "connections_per_listener": (turned_away, {"2": True, "3": False}, {}),
    "handshakes_per_host": (handshakes_admitted, {"2": 2, "4": 4}, {}),
    "listener_memory_bytes": (
        renewed_anew_by_memory,
        {str(40 << 20): ["its memory of 50 MiB exceeds listener_memory_bytes"], str(60 << 20): []}, {},
    ),
    "listener_idle_eviction_s": (idle_connection_is_closed, {"900": True, "1100": False}, {}),
    "ack_delay_s": (delay_of_an_ack, {"0.01": 0.01, "0.02": 0.02}, {}),
    "ack_timeout_s": (
        lambda found: (longest_pause_before_an_ack_is_sent_again(found), unacknowledged_attempts_end(found)),
        {"10": (10.0, True), "25": (25.0, False)}, {},
    ),
    "linger_s": (phase_of_a_server_without_its_writer, {"90": Phase.STOP, "110": Phase.LINGERING}, {}),
    "watchdog_s": (whether_a_silent_listener_counts_as_stopped, {"14": True, "16": False}, {}),
    "heartbeat_s": (pause_of_the_sweep, {"0.5": 0.5, "2": 2.0}, {}),
    "claim_lease_s": (whether_a_claim_is_somebody_elses_after, {"90": True, "110": False}, {}),
    "claim_renew_s": (pause_between_renewals, {"5": 5.0, "7": 7.0}, {}),
    "consumed_rings": (rings_remembered, {"2": 2, "4": 4}, {}),
    "staging_bytes": (staging_pool, {"1000000": 1_000_000, "2000000": 2_000_000}, {}),
    "inline_limit": (tickets_of_one_message, {"999": [1] * 8, "1000": [8]}, {}),
    "records_per_message": (tickets_of_one_message, {"8": [4, 4], "4": [2] * 4}, {}),
    "wires": (wire_of_a_payload, {"tcp": "tcp", "mapped,tcp": "mapped"}, {"addresses": "127.0.0.1"}),
    "bind": (of_a_worker(lambda worker: server_of(worker).bind), {"127.0.0.1": "127.0.0.1", "": ""}, {}),
    "addresses": (
        of_a_worker(lambda worker: worker.write_to_buffer({"step": 1}).addresses),
        {"10.0.0.7": ("10.0.0.7",), "10.0.0.7,10.0.0.8": ("10.0.0.7", "10.0.0.8")}, {},
    ),
    "secret_file": (
        of_a_worker(lambda worker: server_of(worker).secret), {"{folder}/secret": b"between us", "": None}, {}
    ),
    "metrics_port": (address_of_metrics, {"": None, "0": "127.0.0.1"}, {}),
    "metrics_bind": (
        address_of_metrics, {"127.0.0.2": "127.0.0.2", "127.0.0.1": "127.0.0.1"}, {"metrics_port": "0"}
    ),
    "store": (store_of_a_command, {"{store}": 0, "sqlite:/absent/store.db": 2}, {}),
    "run": (
        of_a_worker(lambda worker: worker.ring.name[:-16]),  # without the random rest
        {"": "/transport-rollout-", "seven": "/transport-run-seven@"}, {},
    ),
    "log_level": (lambda found: logged(found)[0], {"INFO": logging.INFO, "ERROR": logging.ERROR}, {}),
    "log_format": (lambda found: logged(found)[1], {"json": True, "text": False}, {}),
}  # fmt: skip


@pytest.mark.ucx
@pytest.mark.parametrize("key", EFFECTS)
def test_a_setting_does_what_its_meaning_says(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, cases, others = EFFECTS[key]
    (tmp_path / "secret").write_bytes(b"between us\n")
    from transport.store import open_store

    store = SQLiteURL(tmp_path / "store.db").text
    open_store(store).close()
    monkeypatch.chdir(tmp_path)
    for other, value in others.items():
        monkeypatch.setenv(config.variable_of(other), value)
    assert len(set(map(repr, cases.values()))) == 2, "two values with one effect show nothing"
    for value, expected in cases.items():
        monkeypatch.setenv(config.variable_of(key), value.format(folder=tmp_path, store=store))
        found = config.configuration()
        found.settings.validate()
        assert seen(found) == expected, f"{config.variable_of(key)}={value}"


def test_every_setting_has_an_effect() -> None:
    assert list(EFFECTS) == list(Configuration.__struct_fields__)


# --- who takes them -------------------------------------------------------------------------------------
@pytest.mark.ucx
def test_the_operators_settings_reach_client_server_claims_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_LINGER_S", "250")
    monkeypatch.setenv("TRANSPORT_CONSUMED_RINGS", "2")
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "45")
    expected = settings_with(linger_s=250.0, consumed_rings=2, claim_lease_s=45.0)
    worker, packer = Worker(), Packer()
    with MemoryQueue() as queue:
        try:
            worker.setup_ucxx(SCHEMA, slots=2, mode="thread", queue=queue)
            packer.setup_ucxx_packer(schemas=[SCHEMA], queue=queue)
            assert server_of(worker).settings == expected
            assert packer._packer.client._settings == packer._packer.settings == expected
            assert packer.consumed_record()._most_rings == 2
            assert packer._packer.claims._renew_s == 15.0  # a third of the queue's lease
        finally:
            packer.cleanup_ucxx_packer()
            worker.cleanup_ucxx()
        assert queue.lease_s == 45.0
        assert GroupQueue(queue, MemoryStore(), "group", 0, 2)._patience_s == 45.0


def test_a_lease_that_is_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "45")
    with MemoryQueue(lease_s=3.0) as queue:
        assert queue.lease_s == 3.0
        assert GroupQueue(queue, MemoryStore(), "group", 0, 2, patience_s=4.0)._patience_s == 4.0
