"""Which settings UCX is given and whose win, and how its errors are named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import Child

from transport.errors import (
    BusyPortError,
    ConnectionLostError,
    InternalError,
    UnreachableError,
    UsageError,
    WireNotAllowedError,
)
from transport.testing import run
from transport.wire.library import NoCommonTransportError, engine, failure, library, translate, version
from transport.wire.ucx import Worker
from transport.wires import settings_for

pytestmark = pytest.mark.ucx

# --- settings ----------------------------------------------------------------------------------------
LOOK = """
import asyncio, json, os
before = dict(os.environ)
from transport.wire.library import library
from transport.wire.ucx import Worker
from transport.wires import settings_for
library()
async def main():
    Worker(settings_for(frozenset({"tcp"}))).close()
asyncio.run(main())
print(json.dumps({
    "chosen": settings_for(frozenset({"tcp"})),
    "added": {name: value for name, value in os.environ.items() if before.get(name) != value},
    "lost": [name for name in before if name not in os.environ],
}))
"""


def look(**env: str) -> dict[str, Any]:
    with Child(LOOK, env=env) as child:
        lines = child.process.communicate()[0].splitlines()
        assert child.wait() == 0
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_ucxxs_own_settings_reach_neither_the_environment_nor_our_contexts() -> None:
    found = look()
    assert set(found["added"]) <= {"UCX_WARN_UNUSED_ENV_VARS", "UCXX_LOG_LEVEL"}
    assert found["lost"] == []
    assert found["chosen"]["RNDV_THRESH"] == "9m"
    assert found["chosen"]["TLS"] == "tcp,self"


def test_the_users_settings_win_over_ours() -> None:
    found = look(UCX_RNDV_THRESH="12345")
    assert found["lost"] == []
    assert "RNDV_THRESH" not in found["chosen"]  # UCX takes it from the environment
    with Child(
        LOOK, env={"UCX_TLS": "rc"}, stderr=subprocess.PIPE
    ) as child:  # nothing here can do that, tcp of ours it could
        assert "WireNotAllowedError" in child.process.communicate()[1]
        assert child.wait() == 1


@pytest.mark.parametrize(
    "env", [{"UCX_LOG_LEVEL": "error"}, {"UCX_LOG_FILE": "/dev/null"}, {"UCX_HANDLE_ERRORS": "none"}], ids=str
)
def test_any_ucx_variable_of_the_users_is_usable(env: dict[str, str]) -> None:
    assert look(**env)["lost"] == []


def test_what_ucx_itself_says_stays_out_of_standard_output() -> None:
    with Child(
        LOOK, env={"UCX_NO_SUCH_SETTING": "1", "UCX_WARN_UNUSED_ENV_VARS": "y"}, stderr=subprocess.PIPE
    ) as child:
        output, errors = child.process.communicate()
        assert child.wait() == 0
    json.loads(output)
    assert "UCX_NO_SUCH_SETTING" in errors


# What ucxx does where LD_LIBRARY_PATH and RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY lead to the UCX of Debian 12.
TOO_OLD = """
import sys
sys.path.insert(0, sys.argv[1])
from transport.__main__ import main
sys.argv[1:] = ["doctor", "--no-transfer"]
main()
"""


def test_a_ucx_that_ucxx_refuses_is_not_called_missing(tmp_path: Path) -> None:
    package = tmp_path / "ucxx" / "_lib"
    package.mkdir(parents=True)
    (tmp_path / "ucxx" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "libucxx.py").write_text('raise ImportError("Support for UCX 1.13.1 has ended.")')
    with Child(TOO_OLD, tmp_path) as child:
        said = child.process.communicate()[0]
    assert "FAIL  ucx: ucxx is installed but cannot be loaded: Support for UCX 1.13.1 has ended." in said
    assert "unset RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" in said
    assert "not installed" not in said


def test_mapped_alone_needs_no_ucx_and_says_so() -> None:
    with pytest.raises(WireNotAllowedError):
        settings_for(frozenset({"mapped"}))


def test_a_context_with_an_unknown_setting_is_refused() -> None:
    async def making() -> None:
        with pytest.raises(UsageError):
            Worker({"NO_SUCH_THING": "1"})

    run(making())


def test_a_failed_request_has_the_error_of_its_status_and_names_its_peer() -> None:
    native = engine()
    for status, ours in (
        (native.ERR_CONNECTION_RESET, ConnectionLostError),
        (native.ERR_CANCELED, ConnectionLostError),
        (native.ERR_REJECTED, ConnectionLostError),
        (-1000, ConnectionLostError),
        (native.ERR_NOT_CONNECTED, UnreachableError),
        (native.ERR_UNREACHABLE, NoCommonTransportError),
        (native.ERR_NO_DEVICE, WireNotAllowedError),
        (native.ERR_BUSY, BusyPortError),
        (native.ERR_INVALID_PARAM, UsageError),
        (native.ERR_INVALID_ADDR, UsageError),
    ):
        error = failure(status, "host:5")
        assert type(error) is ours
        if status == native.ERR_NOT_CONNECTED:
            assert str(error) == "host:5: nothing accepts connections there (UCX: Endpoint is not connected)"
        else:
            assert str(error) == f"host:5: {native.status_text(status)}"
        assert type(translate(native.UcxFault(status, "doing this"))) is ours
    assert native.status_text(native.ERR_CONNECTION_RESET) == "Connection reset by remote peer"


def test_an_error_of_ucxx_is_mapped_by_its_class() -> None:
    low = library()
    for theirs, ours in (
        (low.UCXNoDeviceError, WireNotAllowedError),
        (low.UCXInvalidParamError, UsageError),
        (low.UCXConnectionResetError, ConnectionLostError),
        (low.UCXError, ConnectionLostError),
    ):
        translated = translate(theirs("why"))
        assert type(translated) is ours
        assert str(translated) == "why"
    assert type(translate(AttributeError("why"))) is InternalError
    kept = UnreachableError("x")
    assert translate(kept) is kept
    assert version().count(".") == 2


def test_a_missing_ucxx_names_the_command_that_installs_it() -> None:
    code = """
import sys
sys.modules["ucxx"] = None
from transport.wire.library import library
try:
    library()
except ImportError as error:
    print(type(error).__name__, error)
"""
    with Child(code) as child:
        assert child.line().startswith("MissingDependencyError ucxx is not installed")
        assert child.wait() == 0
