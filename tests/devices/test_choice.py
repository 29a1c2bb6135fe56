"""Directly into device memory or through pinned memory: which, for which wires, and what UCX is told for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import asynchronous, noise, serving

from transport import UCXXClient
from transport.client.connections import links
from transport.client.device_reads import _DIRECT_BYTES
from transport.devices.streams import address_of
from transport.wires import settings_for, user_settings


@pytest.mark.parametrize(
    ("wire", "staged", "direct"),
    [
        ("auto", "^ud,dc", "^ud,dc"),  # whatever UCX finds: CUDA, too, where it was built for it
        ({"tcp"}, "tcp,self", "tcp,self,cuda"),
        ({"shm"}, "sm,tcp", "sm,tcp,cuda"),
        ({"rdma"}, "rc_verbs,rc_mlx5,tcp", "rc_verbs,rc_mlx5,tcp,cuda"),  # GPUDirect
        ({"mapped", "rdma"}, "rc_verbs,rc_mlx5,tcp", "rc_verbs,rc_mlx5,tcp,cuda"),
    ],
)
@asynchronous
async def test_ucx_is_told_of_cuda_only_for_direct_receives(
    wire: Any, staged: str | None, direct: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "TLS" in user_settings():
        pytest.skip("UCX_TLS is set, which wins")
    asked: list[dict[str, str]] = []

    class Made(Exception):
        """No worker is needed here, nor are there such wires."""

    def worker(settings: dict[str, str]) -> Any:
        asked.append(settings)
        raise Made

    def with_rdma(wires: Any, *, refused: str = "", **choices: bool) -> dict[str, str]:
        return settings_for(wires, refused="", **choices)  # as on a host that has a device

    monkeypatch.setattr(links, "Worker", worker)
    monkeypatch.setattr(links, "settings_here", with_rdma)
    for receive in ("staged", "direct"):
        async with UCXXClient(wire=wire, device_receive=receive) as client:  # type: ignore[arg-type]
            with pytest.raises(Made):
                client._links.device_memory()
    assert [settings.get("TLS") for settings in asked] == [staged, direct]


@pytest.mark.ucx
@pytest.mark.parametrize(
    ("receive", "knows", "size", "direct"),
    [
        ("staged", True, _DIRECT_BYTES, False),
        ("direct", False, _DIRECT_BYTES, False),
        ("direct", True, _DIRECT_BYTES, True),
        ("direct", True, _DIRECT_BYTES - 1, False),  # small ones ride in the answer, which the host receives
    ],
)
@asynchronous
async def test_a_payload_goes_directly_where_that_was_asked_for_and_ucx_knows_how(
    receive: Any, knows: bool, size: int, direct: bool, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(slots=1, slot_bytes=1 << 20) as (ring, _):
        async with UCXXClient(wire={"tcp"}, device_receive=receive) as client:
            monkeypatch.setattr(client._links, "device_memory", lambda: knows)
            given: list[Any] = []
            read = client._remote.read

            async def watched(want: Any, deadline: Any, *, spent: bool) -> Any:
                given.append(want.destination)
                return await read(want, deadline, spent=spent)

            monkeypatch.setattr(client._remote, "read", watched)
            out = cupy.empty(size, np.uint8)
            await client.read(ring.write({"x": noise(size)}), out=out)
            cupy.fake.run_all()
            assert out.host.tobytes() == noise(size).tobytes()
            (destination,) = given
            assert isinstance(destination, tuple) == direct
            if direct:
                assert destination[:2] == (address_of(out.host), size)
            else:
                assert client._device_reads._staging.bytes and address_of(destination) != address_of(out.host)
