"""What runs in the guests of `make verbs` alone: two hosts with software RoCE between them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from second_guest import SecondGuest

from transport.doctor.infiniband import ports


@pytest.fixture(scope="session")
def there() -> Iterator[SecondGuest]:
    """The second guest."""
    if not [port for port in ports() if port.state == "ACTIVE"]:
        pytest.skip("no port of RDMA: make verbs has one")
    guest = SecondGuest()
    if subprocess.run(guest.command("true")).returncode:
        pytest.skip("no second guest: make verbs has one")
    yield guest
