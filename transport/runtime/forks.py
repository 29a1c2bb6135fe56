"""No process is forked in the middle of what a forked child must not have half of.

`unforked` is held meanwhile, and a fork in another thread waits for it. Else the child would have locks that no thread
of its own can release, of a module being imported or of UCX, or the other end of a pipe that is read to its end.
"""

from __future__ import annotations

import os
import threading

import transport.decoders  # noqa: F401 - taken behind `unforked`, since registered before: imports under it make decoders

unforked = threading.RLock()
os.register_at_fork(before=unforked.acquire, after_in_parent=unforked.release, after_in_child=unforked.release)
