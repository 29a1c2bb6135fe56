"""A rollout worker, and a data packer that reads by its tickets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packers import SCHEMA, Packer, Worker

from transport.packer.options import ServerOptions


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=16, mode="thread", server=ServerOptions(ports=(0, 0)))
    yield worker
    worker.cleanup_ucxx()


@pytest.fixture(params=["mapped", "tcp"])
def packer(request: pytest.FixtureRequest) -> Iterator[Packer]:
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], wire={request.param})
    yield packer
    packer.cleanup_ucxx_packer()
