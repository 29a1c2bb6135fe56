"""NIXL: an agent in each process, the payloads' memory registered; the client posts READs into its registered buffers.

With NIXL's defaults UCX chooses the transport (memory of the same host: cma); UCX_TLS=tcp makes it TCP. A READ is the
request: nobody is asked, and the server's process sleeps beside NIXL's own progress thread.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nixl_cu12._api import nixl_agent, nixl_agent_config

if TYPE_CHECKING:
    from benchmarks.peers.reads.harness import Link
    from transport.bench.reads.content import Bytes, Content

_UNDER_WAY = "PROC"
_DONE = "DONE"


def _described(arrays: Sequence[Bytes]) -> list[tuple[int, int, int]]:
    return [(array.ctypes.data, array.nbytes, 0) for array in arrays]


def _registered(name: str, arrays: Sequence[Bytes]) -> Any:
    agent = nixl_agent(f"{name}-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(*place, "") for place in _described(arrays)], "DRAM")
    return agent


def serve(content: Content, slots: int, link: Link) -> None:
    """Offer registered memory; its address is the agent's metadata and where the payloads are."""
    payloads = [content.payload(number).copy() for number in range(slots)]
    agent = _registered("server", payloads)
    link.ready(json.dumps({"agent": agent.get_agent_metadata().hex(), "payloads": _described(payloads)}))
    link.wait()


class Client:
    """Handles are made once for each pair of payload and buffer, as a pool would keep them."""

    def __init__(self, address: str, buffers: Sequence[Bytes], concurrency: int) -> None:
        offered = json.loads(address)
        self._agent = _registered("client", buffers)
        self._peer = self._agent.add_remote_agent(bytes.fromhex(offered["agent"]))
        self._local = self._agent.prep_xfer_dlist("", _described(buffers), "DRAM")
        remote = [tuple(place) for place in offered["payloads"]]
        self._remote = self._agent.prep_xfer_dlist(self._peer, remote, "DRAM")
        self._handles: dict[tuple[int, int], Any] = {}
        self._concurrency = concurrency

    def _handle(self, request: tuple[int, int]) -> Any:
        found = self._handles.get(request)
        if found is None:
            payload, at = request
            found = self._agent.make_prepped_xfer("READ", self._local, [at], self._remote, [payload])
            self._handles[request] = found
        return found

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """Post up to ``concurrency``, and look at each in turn until it is done."""
        times: list[float] = []
        under_way: list[tuple[Any, float]] = []
        ahead = iter(requests)
        while len(times) < len(requests):
            while len(under_way) < self._concurrency and (request := next(ahead, None)) is not None:
                begun = time.perf_counter()
                handle = self._handle(request)
                state = self._agent.transfer(handle)
                self._settle(handle, state, begun, under_way, times)
            posted, under_way = under_way, []
            for handle, begun in posted:
                self._settle(handle, self._agent.check_xfer_state(handle), begun, under_way, times)
        return times

    def _settle(
        self, handle: Any, state: str, begun: float, under_way: list[tuple[Any, float]], times: list[float]
    ) -> None:
        if state == _DONE:
            times.append(time.perf_counter() - begun)
        elif state == _UNDER_WAY:
            under_way.append((handle, begun))
        else:
            raise ConnectionError(f"NIXL transfer failed: {state}")

    def close(self) -> None:
        """Let the handles go before their agent."""
        for handle in self._handles.values():
            self._agent.release_xfer_handle(handle)


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """To the other agent."""
    return Client(address, buffers, concurrency)
