"""An InfiniBand card as the kernel shows one, made up: files in a folder, or where every program looks for them."""

from __future__ import annotations

import shlex
from pathlib import Path

# /sys/class with the card in it, in a mount namespace, for one command; nothing else of the machine changes.
_WITHIN = """
set -e
mount -t tmpfs tmpfs /mnt && mkdir /mnt/net && cp -a /sys/class/net/. /mnt/net/ && cp -r {card} /mnt/infiniband
mount --bind /mnt /sys/class
exec "$@"
"""


def card(
    root: Path, device: str, port: int = 1, *, state: str = "4: ACTIVE", sent_words: int = 0, layer: str = "InfiniBand"
) -> Path:
    """Make a port below ``root``, which stands for /sys/class/infiniband."""
    path = root / device / "ports" / str(port)
    files = {
        "state": state,
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": layer,
        "counters/port_xmit_data": str(sent_words),
        "counters/port_rcv_data": "0",
        "counters/symbol_error": "0",
        "counters/link_downed": "2",
    }
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text + "\n")
    return path


def with_card(root: Path, command: list[str]) -> list[str]:
    """Return a command that runs ``command`` on a host with the cards of ``root``; root alone may run it."""
    within = _WITHIN.format(card=shlex.quote(str(root)))
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", within, "sh", *command]
