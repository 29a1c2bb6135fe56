"""UCX is loaded by one thread at a time, and a process that forks meanwhile has a child that can load it, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKED_WHILE_LOADING = """
import os, signal, sys, threading
from transport.wire.ucx import engine, library

loading = threading.Event()

class Seen:
    '''Notes that the import of ucxx's module has begun, and leaves it to the others.'''
    def find_spec(self, name, path=None, target=None):
        if name == "ucxx._lib.libucxx":
            loading.set()

sys.meta_path.insert(0, Seen())
thread = threading.Thread(target=library)
thread.start()
loading.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)  # one that hangs does not outlive the test
    engine()
    os._exit(0)
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_child_that_is_forked_while_ucx_is_loaded_can_load_it() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED_WHILE_LOADING], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
