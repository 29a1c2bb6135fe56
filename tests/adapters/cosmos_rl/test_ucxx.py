"""cosmos-rl's own functions for its transport "ucxx", after `replace_ucxx`: what `register` has no part in."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import eventually, free

if importlib.util.find_spec("cosmos_rl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("cosmos-rl is not installed: pip install cosmos-rl", allow_module_level=True)

with warnings.catch_warnings():  # of what cosmos-rl imports
    warnings.simplefilter("ignore")
    import torch
    from cosmos_rl.utils.payload_transport.registry import make_transport_strategy
    from cosmos_rl.utils.payload_transport.ucxx import UCXXDataPackerMixin
    from cosmos_rl.utils.trajectory import TensorSpec, build_trajectory_schema
    from cosmos_rl.utils.transport_failure import TransportUnusableError
    from cosmos_rl_parts import (
        ROLLOUT,
        SHAPE,
        PayloadContext,
        TensorDataPacker,
        UCXXBufferConfig,
        Worker,
        created,
        fetched,
        put_back,
        ring,
        rollout,
        trajectory,
        upstream_producer,
        upstream_strategy,
    )

from transport.adapters import cosmos_rl
from transport.adapters.cosmos_rl.policy import PREFIX
from transport.errors import ConfigurationError, RingFullError, SchemaError, UsageError
from transport.ticket import Ticket

pytestmark = [pytest.mark.ucx, pytest.mark.adapters("cosmos_rl")]

UPSTREAM_STRATEGY = upstream_strategy.UCXXTransportStrategy


class Derived(UCXXDataPackerMixin, TensorDataPacker):
    """A packer of cosmos-rl's older way: derived from its transport's own mixin."""


@pytest.fixture(autouse=True)
def upstream() -> Iterator[None]:
    with put_back():
        yield


@pytest.fixture
def replaced() -> Iterator[Any]:
    transport = cosmos_rl.replace_ucxx(rollout=ROLLOUT, timeout_s=0.0)
    yield transport
    transport.discarding.close()


@pytest.fixture
def context(replaced: Any) -> Iterator[PayloadContext]:
    with created() as context:
        yield context


def test_a_packer_of_the_older_way_runs_over_our_rings(context: PayloadContext) -> None:
    worker = Worker("ucxx", Derived())
    worker._attach_payload_transport()
    rollouts = [rollout(context, length) for length in (5, 1, 32)]
    for length, found in zip((5, 1, 32), fetched(worker.data_packer, rollouts), strict=True):
        assert torch.equal(found["observations"], torch.full((length, 4), float(length)))
        assert int(found["episode_length"]) == length
    found.clear()
    worker.data_packer.release_prefetch()
    eventually(lambda: free(ring(context)), "the batch is consumed when it is released")
    worker.close_payload_transports()


def test_a_process_without_the_call_refuses_our_references(context: PayloadContext) -> None:
    reference = rollout(context, 2).completion
    assert UPSTREAM_STRATEGY().should_intercept(reference)
    with pytest.raises(TransportUnusableError, match="UCXX payload reference"):
        UPSTREAM_STRATEGY().cache_key(reference)


def test_a_strategy_that_is_made_from_the_configuration_reads_our_payloads(context: PayloadContext) -> None:
    strategy = make_transport_strategy(Worker("ucxx").config)
    strategy.setup(device=torch.device("cpu"), max_attempts=1, read_timeout=7.0)
    try:
        assert strategy.read_timeout == 7.0
        assert strategy.sync_fetch(rollout(context, 4).completion)["observations"].shape == (4, 4)
    finally:
        strategy.shutdown()


def test_the_times_of_the_configuration_are_used(replaced: Any) -> None:
    packer = Derived()
    worker = Worker("ucxx", packer, ucxx_prefetch_timeout=77, ucxx_read_max_attempts=5, ucxx_read_timeout=12.5)
    worker._attach_payload_transport()
    settings = packer._transport_strategy._packer.settings
    assert (settings.read_timeout_s, settings.calls_per_ticket) == (12.5, 5)
    assert packer._prefetch_timeout_s == 77.0
    assert packer._ucxx_dp_read_timeout == 12.5
    assert packer._ucxx_dp_client is not None
    worker.close_payload_transports()


def test_a_read_timeout_that_is_no_time_is_named(replaced: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ucxx_read_timeout = -1.0: give a number of seconds above 0"):
        Worker("ucxx", ucxx_read_timeout=-1)._attach_payload_transport()


def test_the_slots_are_the_jobs_max_entries(context: PayloadContext) -> None:
    assert ring(context).slot_count == 8
    assert context.metrics()["max_slots"] == 8


def test_there_are_as_many_listeners_as_the_job_asks_for_threads(replaced: Any) -> None:
    with created(config=UCXXBufferConfig(max_entries=8, n_server_threads=3)) as context:
        reference = rollout(context, 2).completion["completion"]
        assert len(set(Ticket.parse(reference.removeprefix(PREFIX)).ports)) == 3


def test_the_second_setup_of_a_producer_is_refused(replaced: Any) -> None:
    producer = upstream_producer.UCXXPayloadProducer()
    producer.setup("rollout-0", 32, 4, 2, config=UCXXBufferConfig(max_entries=2))
    try:
        with pytest.raises(UsageError, match="set up already; close it first"):
            producer.setup("rollout-0", 32, 4, 2)
    finally:
        producer.close(timeout=0.0)


def test_a_full_ring_is_an_error_that_names_both_remedies(context: PayloadContext) -> None:
    for _ in range(8):
        rollout(context, 1)
    with pytest.raises(RingFullError, match=r'raise max_entries, or, .* replace_ucxx\(overflow="overwrite"\)'):
        rollout(context, 1)
    with pytest.raises(RingFullError, match="raise max_entries"):
        context.acquire()
    assert ring(context).statistics().overwrites == 0


def test_unread_payloads_are_overwritten_only_where_the_job_asks_for_it() -> None:
    cosmos_rl.replace_ucxx(rollout=ROLLOUT, overflow="overwrite")
    with created() as context:
        for _ in range(9):
            rollout(context, 1)
        assert context.metrics()["drops_total"] == 1


def test_a_schema_too_large_for_a_ticket_is_given_to_the_call() -> None:
    many = [TensorSpec((3,), np.float32, f"a_tensor_with_a_long_name_{number}") for number in range(40)]
    specs = [*build_trajectory_schema(SHAPE), *many]
    cosmos_rl.replace_ucxx(rollout=ROLLOUT)
    with pytest.raises(SchemaError, match=r"46 tensors does not fit into tickets .* give it to replace_ucxx\(schema\)"):
        created(schema=specs)
    cosmos_rl.replace_ucxx(specs, rollout=ROLLOUT)
    worker = Worker("ucxx")
    worker._attach_payload_transport()
    with created(schema=specs) as context:
        (found,) = fetched(worker.data_packer, [rollout(context, 3)])
        assert found["observations"].shape == (3, 4)
        found.clear()
        worker.close_payload_transports()


def test_a_trajectory_of_another_schema_is_one_line(context: PayloadContext) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*observations[^\n]*$"):
        context.publish_tensors({**trajectory(2), "observations": torch.zeros(2, 5)})
    assert free(ring(context))


def test_after_the_rollout_has_ended_its_episode_is_skipped(replaced: Any, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("ucxx", ucxx_read_max_attempts=1, ucxx_read_timeout=1)
    worker._attach_payload_transport()
    context = created()
    gone = rollout(context, 2)
    context.close(timeout=0.0)
    with pytest.raises(RuntimeError, match="closing or closed"):
        rollout(context, 2)
    with caplog.at_level(logging.WARNING):
        assert fetched(worker.data_packer, [gone]) == [None]
    worker.close_payload_transports()
    own = [each for each in caplog.records if each.name.startswith("transport.")]
    assert own
    assert not any("\n" in each.getMessage() for each in own)


def test_a_wrong_choice_is_named() -> None:
    with pytest.raises(UsageError, match="overflow='drop': choose 'block', 'error' or 'overwrite'"):
        cosmos_rl.replace_ucxx(overflow="drop")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout_s"):
        cosmos_rl.replace_ucxx(timeout_s=float("nan"))
