"""How much slower than usual this machine is: TEST_PATIENCE, that `make verbs` sets in its guests.

Longest times of tests are multiplied by it, and so are the timeouts that most tests rely on without naming them: of
`transport.settings.DEFAULTS`, and those of connecting that weights have. Import it before anything of the package that
has default arguments.
"""

from __future__ import annotations

import os

import msgspec

from transport import config, settings

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
_CONNECTING = ("connect_timeout_s", "handshake_timeout_s")


def _patient(given: settings.Settings, *names: str) -> settings.Settings:
    return msgspec.structs.replace(given, **{name: getattr(given, name) * PATIENCE for name in names})


assert config.DEFAULTS is settings.DEFAULTS  # what operators set goes on from the former values
settings.DEFAULTS = _patient(config.DEFAULTS, "read_timeout_s", "watchdog_s", *_CONNECTING)
# For programs that tests start, which have defaults of their own. Connecting may take as long as an answer.
ENVIRONMENT = {"TRANSPORT_READ_TIMEOUT_S": str(settings.DEFAULTS.read_timeout_s)} if PATIENCE > 1 else {}

if PATIENCE > 1:
    from transport.weights.transfer import bucket_sender

    bucket_sender.SETTINGS = _patient(bucket_sender.SETTINGS, *_CONNECTING)
