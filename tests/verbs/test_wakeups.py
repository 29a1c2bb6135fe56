"""What arrives in the moment before a process sleeps: verbs wake a process for what comes after the arming alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from helpers import Child
from second_guest import SecondGuest

pytestmark = [pytest.mark.verbs, pytest.mark.ucx, pytest.mark.slow]

# The processor is taken away: from a listener before each message, so that a payload comes apart from its answer, and
# from a reader before it arms its descriptor again, whose first arming has found what is already done.
PAUSES = """
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void *real(const char *name) { return dlsym(dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD), name); }
static int paused(const char *who) { return strcmp(getenv("PAUSED"), who) == 0; }
int ucp_worker_arm(void *worker) {
  static int last;
  if (last != 0 && paused("reader")) usleep(400000);
  return last = ((int (*)(void *))real("ucp_worker_arm"))(worker);
}
void *ucp_tag_send_nbx(void *endpoint, const void *data, size_t count, unsigned long tag, const void *options) {
  if (paused("listener")) usleep(200000);
  return ((void *(*)(void *, const void *, size_t, unsigned long, const void *))real("ucp_tag_send_nbx"))(
      endpoint, data, count, tag, options);
}
"""
COUNT = 5
LISTENER = f"""
import sys
import numpy as np
from transport import SharedRingBuffer, UCXXServer
from transport.settings import Settings

with SharedRingBuffer.create(slots={COUNT}, slot_bytes=1 << 20) as ring:
    with UCXXServer(ring, mode="thread", settings=Settings(handshake_timeout_s=60)):
        print(*(ring.write_raw(np.full(1 << 20, each, np.uint8)).to_text() for each in range({COUNT})), flush=True)
        sys.stdin.readline()
"""
READER = """
import sys
from transport import BlockingClient, Ticket
from transport.settings import Settings

settings = Settings(read_timeout_s=60, connect_timeout_s=60, handshake_timeout_s=60, attempts_per_read=1)
with BlockingClient(wire={"rdma"}, settings=settings) as client:
    for ticket in sys.argv[1:]:
        payload = client.read(Ticket.parse(ticket), timeout=100)
        print(payload["data"][-1], flush=True)
        payload.release()
"""


def test_a_message_that_comes_right_before_a_process_sleeps_wakes_it(there: SecondGuest, tmp_path: Path) -> None:
    (tmp_path / "pauses.c").write_text(PAUSES)
    pauses = tmp_path / "pauses.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", pauses, tmp_path / "pauses.c"], check=True)
    preloaded = {"LD_PRELOAD": str(pauses)}
    with Child(LISTENER, env={**preloaded, "PAUSED": "listener"}) as listener:
        tickets = listener.line().split()
        with Child(READER, *tickets, env={**preloaded, "PAUSED": "reader"}) as reader:
            assert [reader.line() for _ in tickets] == [str(each) for each in range(COUNT)]
        listener.tell()
        assert listener.wait() == 0
