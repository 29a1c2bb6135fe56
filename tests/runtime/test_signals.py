"""Signals as a request to stop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from transport.errors import UsageError
from transport.runtime.signals import until_stopped


def test_signals_are_asked_for_in_the_main_thread_only() -> None:
    def opened() -> None:
        with until_stopped():
            pass

    with ThreadPoolExecutor() as pool, pytest.raises(UsageError, match="main thread"):
        pool.submit(opened).result()
