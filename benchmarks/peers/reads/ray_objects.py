"""Ray's object store: another process has put the payloads, their references are known; got, and copied out.

A cluster of its own is started on this host, in a temporary folder, and stopped again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

# A token for this cluster only, which the server's process inherits: Ray would leave one in the user's home.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray  # reads them when it is imported

if TYPE_CHECKING:
    from benchmarks.peers.reads.harness import Link
    from transport.bench.reads.content import Bytes, Content

_HOST = "127.0.0.1"
_NAMESPACE = "bench"
_HOLDER = "holder"
_SPARE_BYTES = 256 << 20  # the store's least size is about a third of it


def serve(content: Content, slots: int, link: Link) -> None:
    """Put the payloads; an actor holds their references for the other driver to ask for."""
    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        ray.init(
            address="local",
            _node_ip_address=_HOST,
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=2 * slots * content.size + _SPARE_BYTES,
            namespace=_NAMESPACE,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=folder,
        )

        class Holder:
            def __init__(self, references: list[Any]) -> None:
                self._references = references

            def references(self) -> list[Any]:
                return self._references

        references = [ray.put(content.payload(number)) for number in range(slots)]
        holder = ray.remote(num_cpus=0)(Holder).options(name=_HOLDER).remote(references)
        ray.get(holder.references.remote())
        link.ready(json.dumps(ray.get_runtime_context().gcs_address))
        link.wait()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class Client:
    """A second driver of the same cluster."""

    def __init__(self, address: str, buffers: Sequence[Bytes], concurrency: int) -> None:
        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="error")
        self._references = ray.get(ray.get_actor(_HOLDER).references.remote())
        self._buffers = buffers
        self._concurrency = concurrency

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """As many references in one call as are to be under way."""
        times = []
        ahead = iter(requests)
        while group := list(islice(ahead, self._concurrency)):
            begun = time.perf_counter()
            payloads = ray.get([self._references[payload] for payload, _ in group])
            for (_, at), payload in zip(group, payloads, strict=True):
                np.copyto(self._buffers[at], payload)
                times.append(time.perf_counter() - begun)
        return times

    def close(self) -> None:
        """Leave the cluster."""
        ray.shutdown()


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """To the cluster's address."""
    return Client(json.loads(address), buffers, concurrency)
