"""Threads that decode a type first, at the same time, do not see it half examined."""

from __future__ import annotations

import subprocess
import sys

# Each round has types that nothing has decoded yet. A thread that meets one half examined crashes the process.
FIRST_USE = """
import sys, threading
import msgspec
from transport.decoders import convert, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)
inside = {"number": 1, "text": "a"}
plain = {"first": {"one": inside, "more": [inside]}, "second": {"one": inside, "more": []}}
for at in range(100):
    leaf = msgspec.defstruct(f"Leaf{at}", [("number", "int"), ("text", "str")])
    branch = msgspec.defstruct(f"Branch{at}", [("one", leaf), ("more", list[leaf])])
    tree = msgspec.defstruct(f"Tree{at}", [("first", branch), ("second", branch)])
    ways = [
        lambda: json_decoder(tree)(msgspec.json.encode(plain)),
        lambda: msgpack_decoder(tree)(msgspec.msgpack.encode(plain)),
        lambda: convert(plain, tree),
        lambda: convert(plain["first"], branch),
    ]
    together = threading.Barrier(len(ways))

    def decode(way):
        together.wait()
        way()

    threads = [threading.Thread(target=decode, args=[way]) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_decode_a_type_first_do_not_crash() -> None:
    child = subprocess.run([sys.executable, "-c", FIRST_USE], timeout=60, check=False)
    assert child.returncode == 0
