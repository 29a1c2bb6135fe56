"""A command on a host that has IPv6 alone, its loopback included: ``python ipv6_alone.py COMMAND …``, as root.

It ends with the command's exit status, or with 1 where there can be no such host.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "weights"))
from links import namespaces, refusal


def main(command: list[str]) -> int:
    """Run the command there."""
    if why_not := refusal("ip"):
        print(f"no host with IPv6 alone: {why_not}", file=sys.stderr)
        return 1
    with namespaces(1, ipv6=True) as [name]:
        within = ["ip", "netns", "exec", name]
        subprocess.run([*within, "ip", "address", "del", "127.0.0.1/8", "dev", "lo"], check=True)
        return subprocess.run([*within, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
