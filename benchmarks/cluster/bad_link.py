"""A bad link: carries frames between two interfaces, loses some and delays those of one direction. Runs until killed.

    python bad_link.py INSIDE OUTSIDE LOSS LOSS_BACK DELAY_S SEED

Of what comes from INSIDE a share of LOSS is lost, and the rest is delayed, as `tc qdisc add … netem` does at a host's
own interface; of what goes there, a share of LOSS_BACK is lost.
A frame is what a host hands to its interface: up to 64 KiB of one TCP connection (segmentation offload), lost as one.
It stands in for netem, which many kernels lack, and acts the same on every kernel.
"""

from __future__ import annotations

import collections
import random
import select
import socket
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_LARGEST = (64 << 10) + 256
_BUFFER_BYTES = 8 << 20
_AT_ONCE = 64


def opened(interface: str) -> socket.socket:
    """Every frame that arrives there, with the header that says how it is to be segmented and checksummed."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        packets.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    packets.bind((interface, _ETH_P_ALL))
    packets.setblocking(False)
    return packets


def carry(inside: str, outside: str, loss: float, loss_back: float, delay_s: float, seed: int) -> None:
    """For ever. Losses are shares of all frames, 0 to 1."""
    choose = random.Random(seed)
    ends = opened(inside), opened(outside)
    losses = {ends[0]: loss, ends[1]: loss_back}
    late: collections.deque[tuple[float, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for end in select.select(ends, [], [], wait_s)[0]:
            for _ in range(_AT_ONCE):
                try:
                    frame = end.recv(_LARGEST)
                except BlockingIOError:
                    break
                except OSError:  # the interface is down, or gone
                    break
                if choose.random() < losses[end]:
                    continue
                if delay_s and end is ends[0]:
                    late.append((time.monotonic() + delay_s, frame))
                else:
                    _send(ends[end is ends[0]], frame)
        while late and late[0][0] <= time.monotonic():
            _send(ends[1], late.popleft()[1])


def _send(end: socket.socket, frame: bytes) -> None:
    try:
        end.send(frame)
    except OSError:  # full, down or gone: lost, as on a wire
        return


if __name__ == "__main__":
    lost, lost_back, late_s = map(float, sys.argv[3:6])
    carry(sys.argv[1], sys.argv[2], lost, lost_back, late_s, int(sys.argv[6]))
