"""Record types are examined when their modules are imported, not by the threads that decode first."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Whoever examines an enumeration stops for a moment in the middle of it, and the others come.
FIRST_USE = """
import enum, sys, threading, time

plain = enum.EnumType.__setattr__

def slowly(cls, name, value):
    plain(cls, name, value)
    if name.startswith("__msgspec"):
        time.sleep(0.05)

enum.EnumType.__setattr__ = slowly

import msgspec
from importlib import import_module

kind = getattr(import_module(sys.argv[1]), sys.argv[2])
together = threading.Barrier(4)

def decode():
    together.wait()
    try:
        msgspec.json.decode(sys.argv[3], type=kind)
    except msgspec.ValidationError:
        pass  # of missing fields, after those that were there

threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize(
    ("module", "kind", "record"),
    [
        ("transport.cooldown.epochs.records", "EpochRecord", '{"phase": "training", "run": "a", "clients": ["a"]}'),
        ("transport.cooldown.epochs.records", "UploadReport", '{"kind": "model_stored", "run": "a"}'),
        ("transport.rendezvous.records", "Closing", '{"reason": "finished", "status": "finished"}'),
    ],
)
def test_threads_that_decode_a_record_first_do_not_crash(module: str, kind: str, record: str) -> None:
    child = subprocess.run([sys.executable, "-c", FIRST_USE, module, kind, record], timeout=60, check=False)
    assert child.returncode == 0
