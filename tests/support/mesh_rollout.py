"""A rollout of a mesh for tests: `mesh_rollout.py RINGS ADDRESS NUMBER OF`.

It is the NUMBERth of OF, and writes its samples of groups, each of which lies in several rings. It says "open". Told
"pause" it says how many groups it has written, "end COUNT": it writes until there are as many and says the end of the
data, "bye": it says how many payloads its ring has unread.
"""

from __future__ import annotations

import select
import sys

import numpy as np

from transport import Rollout, Schema, ServerOptions, UpTo

SAMPLES = 4  # of a group
SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))


def main(rings: str, address: str, number: int, of: int) -> None:
    """Write until somebody says the end."""

    def write(group: int) -> None:
        for sample in range(SAMPLES):
            if (group + sample) % of == number:
                tokens = 8 + group % 50
                fields = {"tokens": np.full(tokens, group, np.int32)}
                rollout.write(fields, group=f"p{group}", of=SAMPLES, tokens=tokens)

    server = ServerOptions(addresses=(address,))
    with Rollout(SCHEMA, rings, slots=64, mode="thread", drain_s=0, server=server) as rollout:
        print("open", flush=True)
        written = 0
        while not select.select([sys.stdin], [], [], 0.0)[0]:
            write(written)
            written += 1
        sys.stdin.readline()
        print(written, flush=True)
        for group in range(written, int(sys.stdin.readline())):
            write(group)
        rollout.ring.end_data()
        sys.stdin.readline()
        print(rollout.ring.native.unread, flush=True)


if __name__ == "__main__":
    rings, address, *numbers = sys.argv[1:]
    main(rings, address, *map(int, numbers))
