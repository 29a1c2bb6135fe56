"""A pytest plugin for TransferQueue's own tests: they know our backend by its name, and every process registers it.

TQ_TEST_BACKEND=PayloadTransport python -m pytest -p transferqueue_upstream tests/e2e/test_kv_interface_e2e.py
"""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from transport.adapters import transferqueue_plugin

CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "PayloadTransport", "PayloadTransport": {"ring_bytes": 16 << 20}},
}


def pytest_configure() -> None:
    transferqueue_plugin.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        getattr(module, "BACKEND_CONFIGS", {})["PayloadTransport"] = CONFIG
        if hasattr(module, "_TQ_CONFIG"):  # of the tests of checkpoints, which are for SimpleStorage alone
            module._TQ_CONFIG = OmegaConf.create(CONFIG)
