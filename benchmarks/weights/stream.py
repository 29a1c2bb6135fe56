"""One plain TCP stream, the limit that weights are compared with: a receiver that prints its port and then its rate.

python benchmarks/weights/stream.py ADDRESS               receive
python benchmarks/weights/stream.py ADDRESS PORT BYTES    send
"""

from __future__ import annotations

import socket
import sys
import time

_PIECE = 1 << 20


def receive(address: str) -> float:
    """Bytes per second of the one connection that comes, from its first bytes on."""
    with socket.create_server((address, 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
        with connection:
            memory = bytearray(_PIECE)
            begun, received = 0.0, 0
            while count := connection.recv_into(memory):
                received += count
                if not begun:
                    begun, received = time.monotonic(), 0
            return received / max(1e-9, time.monotonic() - begun)


def send(address: str, port: int, size: int) -> None:
    """Send so many bytes."""
    with socket.create_connection((address, port)) as connection:
        memory = bytes(_PIECE)
        for _ in range(-(-size // _PIECE)):
            connection.sendall(memory)


def main() -> int:
    """One end."""
    if len(sys.argv) == 2:
        print(receive(sys.argv[1]), flush=True)
    else:
        send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
