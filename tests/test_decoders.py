"""Threads that decode a type first, at the same time, do not see it half examined."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


# A type whose examination runs Python code: as where a child is forked, or something is freed, in the middle of one.
IN_THE_MIDDLE = """
import os, signal, sys, threading
import msgspec
from transport.decoders import json_decoder

signal.alarm(40)

class Other(msgspec.Struct):
    x: int

def fork():
    examining.wait()
    if (child := os.fork()) == 0:
        signal.alarm(20)
        json_decoder(Other)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def middle():
    if sys.argv[1] == "forked":
        examining.set()
        forking.wait()
    else:
        json_decoder(Other)
    return int

examining, forking = threading.Event(), threading.Event()
os.register_at_fork(before=forking.set)
kind = msgspec.defstruct("Examined", [("x", "middle()")], namespace={"__module__": __name__})
if sys.argv[1] == "forked":
    threading.Thread(target=json_decoder, args=[kind]).start()
    fork()
json_decoder(kind)
"""


@pytest.mark.parametrize("how", ["forked", "freed"])
def test_who_decodes_first_in_the_middle_of_an_examination_does_not_hang(how: str) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IN_THE_MIDDLE, how], timeout=60, check=False)
    assert done.returncode == 0


# The order of the imports is the wrong one: what is registered last is called first.
WHILE_IMPORTING = """
import os, signal, threading
import msgspec
from transport.runtime.forks import unforked
from transport.decoders import json_decoder

signal.alarm(40)
over = threading.Event()

def first_use():
    while not over.is_set():
        with unforked:  # as while a module is imported that has a decoder
            json_decoder(msgspec.defstruct("Other", [("x", int)]))

other = threading.Thread(target=first_use)
other.start()
for _ in range(50):
    if (child := os.fork()) == 0:
        json_decoder(msgspec.defstruct("Other", [("x", int)]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
over.set()
other.join()
"""


@pytest.mark.nightly
def test_a_fork_beside_a_first_use_under_the_lock_of_forks_does_not_hang() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WHILE_IMPORTING], timeout=60, check=False)
    assert done.returncode == 0
