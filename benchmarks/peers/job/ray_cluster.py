"""A Ray cluster on this host for one repetition, with a folder and a token of its own; gone when the block ends.

With RAY_ADDRESS in the environment the cluster is the one that runs there, and stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

_HOST = "127.0.0.1"
NAMESPACE = "bench"
_SPARE_BYTES = 256 << 20  # the store's least size is about a third of it


@contextlib.contextmanager
def cluster(job: Any) -> Iterator[str]:
    """Its address and token, as a line that `join` takes."""
    running = os.environ.get("RAY_ADDRESS")
    if running:
        join(json.dumps([running, ""]))
        import ray

        try:
            yield json.dumps([running, ""])
        finally:
            ray.shutdown()
        return
    # Ray would leave a token in the user's home; it reads these when it is imported.
    token = secrets.token_hex(32)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        ray.init(
            address="local",
            _node_ip_address=_HOST,
            num_cpus=4,  # actors of TransferQueue reserve one each
            include_dashboard=False,
            object_store_memory=3 * job.window * job.writers * job.size_bytes + _SPARE_BYTES,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=folder,
        )
        yield json.dumps([ray.get_runtime_context().gcs_address, token])
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def join(place: str) -> None:
    """Have this process take part as a driver."""
    address, token = json.loads(place)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    if token:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    import ray

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
