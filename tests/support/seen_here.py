"""What the settings of one host are seen to do, for test_setting_effects.py."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

from packers import Packer

from transport import Schema, UCXXRolloutMixin, config
from transport.cli import run as command
from transport.observe.metrics import configured_exporter
from transport.runtime.logs import set_up_logging

Configuration = config.Configuration
PORT, OTHER = ("127.0.0.1", 1), ("127.0.0.1", 2)
SCHEMA = Schema.of(step=("int64",))


class Worker(UCXXRolloutMixin): ...


# --- what belongs to one host ---------------------------------------------------------------------------
def wire_of_a_payload(found: Configuration) -> str:
    worker, packer = Worker(), Packer()
    try:
        worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
        packer.setup_ucxx_packer(schemas=[SCHEMA])
        packer.start_prefetch([worker.write_to_buffer({"step": 3})])
        batch = packer.collect_prefetch()
        assert batch is not None
        (payload,) = packer.consume(batch)
        payload.release()
        return payload.wire
    finally:
        packer.cleanup_ucxx_packer()
        worker.cleanup_ucxx()


def of_a_worker(look: Callable[[Worker], Any]) -> Callable[[Configuration], Any]:
    def seen(_: Configuration) -> Any:
        worker = Worker()
        try:
            worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
            return look(worker)
        finally:
            worker.cleanup_ucxx()

    return seen


def server_of(worker: Worker) -> Any:
    assert worker._ucxx_server is not None
    return worker._ucxx_server._config


def address_of_metrics(found: Configuration) -> str | None:
    exporter = configured_exporter(found)
    if exporter is None:
        return None
    with exporter:
        assert exporter._shared is not None
        return str(exporter._shared._server.server_address[0])


def store_of_a_command(_: Configuration) -> int:
    """`transport cooldown status` finds the epochs of a store that is there, and refuses one that is not."""
    return command(["cooldown", "status"])


def logged(found: Configuration) -> tuple[int, bool]:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    root.handlers.clear()
    try:
        set_up_logging(found)
        record = logging.LogRecord("x", logging.ERROR, "", 1, "said", None, None)
        text = root.handlers[0].format(record)
        with contextlib.suppress(json.JSONDecodeError):
            return root.level, isinstance(json.loads(text), dict)
        return root.level, False
    finally:
        root.level, root.handlers[:] = before[0], before[1]
