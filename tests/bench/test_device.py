"""The measurements with ``--device``: what is refused without one, and their device side over the stand-in for CuPy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous
from links import Links
from measure import Case, configurations
from model import Model

from transport import SharedRingBuffer
from transport.bench.reads.content import Content
from transport.bench.reads.reader import ON_DEVICE, Reader, Reading
from transport.cli import run
from transport.weights.versions.layout import weights_checksum

COMMANDS = (["loopback"], ["fetch", "127.0.0.1:1"])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_is_asked_for_by_its_kind(command: list[str], cupy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *command, "--device", "rocm"]) == 2
    assert "--device rocm: choose cuda" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_where_there_is_no_device_nothing_is_measured(
    command: list[str], cupy: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy.fake.count = 0
    assert run(["bench", *command, "--device", "cuda"]) == 1
    assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert run(["bench", *command, "--device", "cuda"]) == 1
    assert "pip install 'cupy-cuda12x" in capsys.readouterr().err


def test_the_model_on_a_device_is_the_one_on_the_host(cupy: Any) -> None:
    host, device = Model(1 << 20), Model(1 << 20, device=True)
    for changed in (0.0, 0.01, 0.5):
        assert host.told(changed) == device.told(changed)
        sent = dict(device.weights(0))
        assert all(isinstance(array, cupy.ndarray) for array in sent.values())
        plain = {name: array.view(np.float16) for name, array in host.weights(0)}
        assert weights_checksum(sent) == weights_checksum(plain)


def test_every_member_is_told_of_the_device() -> None:
    with Links.made(0, 0.0) as links:
        trainer, replica = (config for _, _, config in configurations(Case("delta", 1 << 20, 1, device=True), links))
    assert trainer["arguments"]["device"] is True and "device" not in trainer["engine"]
    assert replica["engine"]["device"] == "cupy"


@pytest.mark.ucx
@asynchronous
async def test_the_reader_compares_what_arrived_on_the_device(cupy: Any) -> None:
    cupy.ones = lambda size, dtype: cupy.asarray(np.ones(size, dtype))
    with SharedRingBuffer.create(slots=2, slot_bytes=4096) as each:
        reader = Reader(Reading(way=ON_DEVICE, wire="mapped", size_bytes=4096, payloads=2, checksum=True))
        reader.have(1)
        content = Content(4096)
        tickets = [
            each.write({"data": cupy.on_device(content.payload(number))}, metadata={"number": number})
            for number in range(2)
        ]
        timed = await reader.batch(tickets, 1)
        assert (timed.bytes, len(timed.times_s)) == (8192, 2)
        await reader.close()
