"""Wake-ups between processes: what an interrupt leaves behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from interrupted_locks import check_left_free

from transport.storage.notify import Bell


@pytest.mark.nightly
def test_an_interrupted_wait_or_ring_keeps_no_other_thread_from_the_bell(tmp_path: Path) -> None:
    with contextlib.closing(Bell(tmp_path / "wake")) as bell:

        def use() -> None:
            bell.ring()
            bell.wait(bell.seen(), 0.0)

        check_left_free(use, bell.ring)
