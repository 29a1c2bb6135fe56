"""Our transport in torchft's own test of transports, and under its Manager, whose replicas are processes."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter, defaultdict, namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import TestCase

import pytest
from helpers import Child

with warnings.catch_warnings():  # of the framework and of what it imports
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchft", reason="torchft is not installed", exc_type=ImportError)
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
    from torchft.checkpointing.transport_test import make_state_dict, run_multi_recovery_test

from transport.adapters.torchft import PayloadTransport
from transport.errors import SchemaError, TransportError, UsageError

pytestmark = [pytest.mark.ucx, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TIMEOUT = timedelta(seconds=20)
SOON = timedelta(milliseconds=50)


@pytest.fixture(scope="module", autouse=True)
def once_for_the_process() -> None:
    """What gloo and torch's stores open at their first use stays open."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    make_state_dict(torch.device("cpu"))
    dist.destroy_process_group()
    with transports(1) as (alone,):
        alone.send_checkpoint([0], 1, {}, TIMEOUT)
        alone.recv_checkpoint(0, alone.metadata(), 1, TIMEOUT)


@contextlib.contextmanager
def transports(count: int = 2, **options: Any) -> Iterator[list[PayloadTransport]]:
    made = [PayloadTransport(TIMEOUT, address="127.0.0.1", mode="thread", **options) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.shutdown()


@pytest.mark.parametrize("wire", ["auto", {"tcp"}], ids=["mapped", "tcp"])
def test_torchfts_own_test_of_transports(wire: Any) -> None:
    device = torch.device("cpu")

    def made(rank: int, world: int) -> PayloadTransport:
        own = partial(make_state_dict, device)
        return PayloadTransport(TIMEOUT, own, address="127.0.0.1", mode="thread", wire=wire)

    run_multi_recovery_test(TestCase(), made, device)


def test_a_state_is_what_it_was_when_it_was_sent() -> None:
    model = torch.nn.Linear(300, 200).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(300, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = {"user": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "torchft": {"step": 7}}
    sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with transports() as (sender, receiver):
        sender.send_checkpoint([1], 7, state, TIMEOUT)
        sender.disallow_checkpoint()
        with torch.no_grad():
            model.weight.zero_()
        found = receiver.recv_checkpoint(0, sender.metadata(), 7, TIMEOUT)
        sender.disallow_checkpoint()
        with pytest.raises(dist.DistStoreError, match="timeout"):  # all have it, and it is gone
            receiver.recv_checkpoint(0, sender.metadata(), 7, SOON)
    assert found["torchft"] == {"step": 7}
    assert all(torch.equal(found["user"]["model"][name], sent[name]) for name in sent)
    torch.optim.Adam(model.parameters()).load_state_dict(found["user"]["optimizer"])
    assert torch.equal(found["user"]["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_state_of_a_step_is_received_by_ranks_that_came_first() -> None:
    with transports(3) as (sender, *receivers), ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(each.recv_checkpoint, 0, sender.metadata(), 1, TIMEOUT) for each in receivers]
        sender.send_checkpoint([1, 2], 1, {"w": torch.arange(5)}, TIMEOUT)
        assert [future.result()["w"].tolist() for future in futures] == [[0, 1, 2, 3, 4]] * 2


def test_what_cannot_travel_is_named_and_the_next_state_is_sent() -> None:
    with transports() as (sender, receiver):
        with pytest.raises(SchemaError, match=r"model\.callback"):
            sender.send_checkpoint([1], 1, {"model": {"callback": print}}, TIMEOUT)
        sender.send_checkpoint([1], 2, {"w": 5}, TIMEOUT)
        assert receiver.recv_checkpoint(0, sender.metadata(), 2, TIMEOUT) == {"w": 5}


def test_containers_come_back_with_their_class_or_are_refused() -> None:
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [3, 3, 5])
    kept = {"scheduler": scheduler.state_dict(), "shape": torch.ones(2, 3).shape}
    with transports() as (sender, receiver):
        for wrong in (namedtuple("Moments", "mean var")(1, 2), defaultdict(dict)):
            with pytest.raises(SchemaError, match=r"state\.optimizer: a "):
                sender.send_checkpoint([1], 1, {"optimizer": wrong}, TIMEOUT)
        sender.send_checkpoint([1], 2, kept, TIMEOUT)
        found = receiver.recv_checkpoint(0, sender.metadata(), 2, TIMEOUT)
    assert found == kept
    assert type(found["scheduler"]["milestones"]) is Counter
    assert type(found["shape"]) is torch.Size


def test_a_dtensor_needs_a_state_of_its_receiver() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        tensor = DTensor.from_local(torch.arange(3.0), DeviceMesh("cpu", [0]), [Replicate()], run_check=False)
        with transports() as (sender, receiver):
            sender.send_checkpoint([1], 1, {"model": {"w": tensor}}, TIMEOUT)
            with pytest.raises(UsageError, match=r"model\.w: a DTensor"):
                receiver.recv_checkpoint(0, sender.metadata(), 1, TIMEOUT)
    finally:
        dist.destroy_process_group()


def test_a_receiver_without_the_secret_gets_nothing() -> None:
    with (
        transports(2, secret=b"secret", wire={"tcp"}) as (sender, receiver),
        transports(1, wire={"tcp"}) as (stranger,),
    ):
        sender.send_checkpoint([1], 1, {"w": 5}, TIMEOUT)
        assert receiver.recv_checkpoint(0, sender.metadata(), 1, TIMEOUT) == {"w": 5}
        with pytest.raises(TransportError, match="secret"):
            stranger.recv_checkpoint(0, sender.metadata(), 1, timedelta(seconds=5))


LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100, heartbeat_timeout_ms=1000)
print(server.address(), flush=True)
sys.stdin.readline()
server.shutdown()
"""
REPLICA = """
import runpy, sys
sys.argv = ["torchft_replica", *sys.argv[1:]]
runpy.run_module("torchft_replica", run_name="__main__")
"""
STEPS = 6


def both(one: Child, other: Child) -> tuple[list[str], list[str]]:
    return one.line().split(), other.line().split()


@pytest.mark.slow
@pytest.mark.timeout(300)  # four processes import torch
def test_a_replica_that_was_killed_heals_from_the_memory_of_the_other() -> None:
    with Child(LIGHTHOUSE) as lighthouse:
        address = f"http://127.0.0.1:{lighthouse.line().rpartition(':')[2]}"
        with Child(REPLICA, address, "a", STEPS) as first:
            with Child(REPLICA, address, "b", STEPS) as second:
                for step in ("1", "2", "3"):
                    of_first, of_second = both(first, second)
                    assert of_first[0] == of_second[0] == step
                    assert of_first[2] == of_second[2]  # one of them began with the weights of the other
                    if step != "3":
                        first.tell()
                        second.tell()
                second.kill()
            first.tell()
            with Child(REPLICA, address, "b", STEPS) as again:
                for step in ("4", "5", "6"):
                    of_first, of_again = both(first, again)
                    assert of_again == [step, "1", of_first[2]]  # it healed once, and has the same weights and moments
                    first.tell()
                    again.tell()
                assert (first.wait(), again.wait()) == (0, 0)
        lighthouse.tell()
        assert lighthouse.wait() == 0
