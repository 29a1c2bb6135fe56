"""What listens at a port is looked at before UCX connects: another service, or nobody, must not end the process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from helpers import settings_with
from own_network import said_in_own_network

from transport import BlockingClient
from transport.errors import RetriesExhaustedError, UnreachableError
from transport.testing import a_ticket

pytestmark = pytest.mark.ucx


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a service that sends back what it gets."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                with client:
                    try:
                        while data := client.recv(65536):
                            client.sendall(data)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_service_that_sends_bytes_back_is_no_listener(echo: int) -> None:
    settings = settings_with(calls_per_ticket=1, attempts_per_read=1)
    with BlockingClient(wire={"tcp"}, settings=settings) as client:
        for _ in range(5):
            with pytest.raises(RetriesExhaustedError) as error:
                client.read(a_ticket(ports=(echo,)))
            assert isinstance(error.value.__cause__, UnreachableError)
            assert "no listener" in str(error.value.__cause__)


_TO_ITSELF = """
import asyncio
from pathlib import Path
from transport.errors import RetriesExhaustedError, UnreachableError
from transport.testing import a_ticket
from transport.wire.probing import probe

Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40001")
said = set()
while not any("itself" in each for each in said):  # the kernel chooses one of two ports
    try:
        asyncio.run(probe("127.0.0.1", 40000, 5.0))
    except UnreachableError as error:
        said.add(str(error))
"""


def test_a_connection_that_leads_to_itself_is_refused() -> None:
    said_in_own_network(_TO_ITSELF)
