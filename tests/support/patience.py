"""How much slower than usual this machine is: TEST_PATIENCE, that `make verbs` sets in its guests.

Longest times of tests are multiplied by it, and so are the timeouts of `transport.settings.DEFAULTS`, which most tests
rely on without naming them. Import it before anything of the package that has default arguments.
"""

from __future__ import annotations

import os

import msgspec

from transport import config, settings

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
_TIMEOUTS = ("read_timeout_s", "connect_timeout_s", "handshake_timeout_s", "watchdog_s")

assert config.DEFAULTS is settings.DEFAULTS  # what operators set goes on from the former values
settings.DEFAULTS = msgspec.structs.replace(
    config.DEFAULTS, **{name: getattr(settings.DEFAULTS, name) * PATIENCE for name in _TIMEOUTS}
)
# For programs that tests start, which have defaults of their own. Connecting may take as long as an answer.
ENVIRONMENT = {"TRANSPORT_READ_TIMEOUT_S": str(settings.DEFAULTS.read_timeout_s)} if PATIENCE > 1 else {}
