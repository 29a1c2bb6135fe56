"""The only file that imports ucxx and the native engine, and our errors for what they raise.

ucxx provides the library, the context and the worker; the native engine uses the UCX library that ucxx has loaded. Both
are imported when first needed, in one thread at a time, and no process is forked meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

from transport import rdma
from transport.errors import (
    BusyPortError,
    ConnectionLostError,
    InternalError,
    MissingDependencyError,
    TransportError,
    UnreachableError,
    UsageError,
    WireNotAllowedError,
)
from transport.runtime.forks import unforked
from transport.runtime.installing import install
from transport.wire import verbs
from transport.wires import Wire, admits_rdma, settings_for, settings_to_load, user_settings

log = logging.getLogger(__name__)


# --- the import ---------------------------------------------------------------------------------
@cache
def library() -> ModuleType:
    """ucxx's low-level module.

    Raises:
        MissingDependencyError: ucxx is not installed, or the UCX that it finds does not fit it.
    """
    with unforked:
        return _loaded()


@cache
def _loaded() -> ModuleType:
    user = {name for name in os.environ if name.startswith("UCX_")}
    user_settings()
    for name, value in settings_to_load().items():  # read when the library is loaded; a context cannot set them
        os.environ.setdefault(f"UCX_{name}", value)
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCXX_LOG_LEVEL", "FATAL")  # lost peers are raised here as errors; UCXX need not print them
    _chosen()
    try:
        import ucxx._lib.libucxx as low
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            raise MissingDependencyError(f"ucxx is installed but cannot be loaded: {error}") from error
        raise MissingDependencyError(
            "ucxx is not installed, so payloads can only be read on the host of their ring (wire 'mapped'); "
            f"install it with: {install('cu12')} (CUDA 13: {install('cu13')}; neither needs a GPU)"
        ) from error
    # ucxx's own choices must not reach child processes as if the user had made them.
    for name in [name for name in os.environ if name.startswith("UCX_") and name not in user]:
        if name != "UCX_WARN_UNUSED_ENV_VARS":
            del os.environ[name]
    module: ModuleType = low
    return module


@cache
def _chosen() -> verbs.Lack | None:
    return verbs.load()


@cache
def engine() -> ModuleType:
    """Return the native engine, which finds the UCX library that ucxx has loaded.

    Raises:
        MissingDependencyError: ucxx is not installed.
    """
    with unforked:
        library()
        from transport import _ucp

        return _ucp


def version() -> str:
    """Version of the UCX library that is loaded, e.g. "1.21.0"."""
    return ".".join(str(part) for part in library().get_ucx_version())


def library_path() -> Path | None:
    """Return the file of the loaded libucp; None if it cannot be determined."""
    library()
    return verbs.loaded_library()


def lack_of_verbs() -> verbs.Lack | None:
    """Return why the loaded UCX has no plug-in for RDMA devices, and what to type; None where it has one."""
    path, lack = library_path(), _chosen()
    if lack is None or path is None:
        return lack
    return None if has_plugin("libuct_ib", path) else lack


def has_plugin(name: str, ucx: Path) -> bool:
    """Return whether the UCX whose libucp is the file ``ucx`` has the plug-in, e.g. libuct_rdmacm."""
    plugins = Path(os.environ.get("UCX_MODULE_DIR") or ucx.parent / "ucx")
    return any(plugins.glob(f"{name}.so*"))


@cache
def connects_by_tcp() -> bool:
    """Return whether the loaded UCX makes every connection over TCP: it has no rdmacm, or there is no RDMA device."""
    path = library_path()
    return not rdma.ports() or (path is not None and not has_plugin("libuct_rdmacm", path))


def settings_here(
    wires: frozenset[Wire] | None,
    *,
    shared_memory: bool = True,
    locked_bytes: int = 0,
    refused: str = "",
    ipv6: bool = False,
    interface: str | None = None,
) -> dict[str, str]:
    """Return UCX settings for a context of this process; say once in the log where it has to do without rdma.

    Args:
        wires, shared_memory, ipv6, interface: as `settings_for` takes them.
        locked_bytes: memory that is to be registered with an RDMA device, beside UCX's own.
        refused: why rdma cannot be used, where that is known already.

    Raises:
        MissingDependencyError: ucxx is not installed.
        WireNotAllowedError: no wire is left.
    """
    library()
    refused = refused or rdma.refusal(locked_bytes)
    if not refused and (lack := lack_of_verbs()):
        refused = f"{lack.why}: {lack.remedy}"
    settings = settings_for(wires, shared_memory=shared_memory, refused=refused, ipv6=ipv6, interface=interface)
    if refused and admits_rdma(settings_for(wires, shared_memory=shared_memory, refused="")):
        _without_rdma(refused, asked=wires is not None)
    return settings


@cache
def _without_rdma(why: str, *, asked: bool) -> None:
    if asked or rdma.ports():
        log.warning("payloads go without rdma: %s", why)


def all_transports() -> list[tuple[str, str]]:
    """Return (transport, device) of all that the loaded UCX can use on this host, whatever this process may lock."""
    lack = lack_of_verbs()
    return transports_here(settings_for(refused=lack.why if lack else ""))


def transports_here(settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """(transport, device) of all that UCX can use on this host with ``settings``, e.g. ("tcp", "eth0")."""
    low = library()
    with unforked, translated("making a UCX context"):
        shown = str(low.UCXContext(dict(settings), (low.Feature.TAG, low.Feature.WAKEUP, low.Feature.STREAM)).info)
    return sorted(set(re.findall(r"resource +\d+ .* (\w+)/(\S+)$", shown, re.MULTILINE)))


# --- errors -------------------------------------------------------------------------------------
class NoCommonTransportError(UnreachableError):
    """UCX finds no transport by which both sides reach each other."""


@cache
def _error_classes() -> tuple[tuple[type[BaseException], type[TransportError]], ...]:
    """UCXX's exceptions of making a context or worker, with our classes; the most specific first."""
    low = library()
    return (
        (low.UCXNoDeviceError, WireNotAllowedError),
        (low.UCXInvalidParamError, UsageError),
        (low.UCXError, ConnectionLostError),
    )


@cache
def _error_of_status() -> dict[int, type[TransportError]]:
    native = engine()
    return {
        native.ERR_BUSY: BusyPortError,
        native.ERR_NO_DEVICE: WireNotAllowedError,
        native.ERR_UNREACHABLE: NoCommonTransportError,
        native.ERR_NOT_CONNECTED: UnreachableError,
        native.ERR_INVALID_PARAM: UsageError,
        native.ERR_INVALID_ADDR: UsageError,
    }


def failure(status: int, what: str) -> TransportError:
    """Our error for a UCX status (negative)."""
    text = engine().status_text(status)
    if status == engine().ERR_NOT_CONNECTED:  # what UCX makes of a refused connection
        text = f"nothing accepts connections there (UCX: {text})"
    return _error_of_status().get(status, ConnectionLostError)(f"{what}: {text}")


def translate(error: BaseException) -> TransportError:
    """Our error for one of UCXX's, by class, or for the engine's, by status."""
    if isinstance(error, TransportError):
        return error
    if isinstance(error, engine().UcxFault):
        return failure(error.args[0], "UCX refused")
    for theirs, ours in _error_classes():
        if isinstance(error, theirs):
            return ours(str(error) or type(error).__name__)
    return InternalError(f"unexpected {type(error).__name__} from ucxx: {error}")


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Map what ucxx and the engine raise to our errors, saying what was being done."""
    try:
        yield
    except (TransportError, asyncio.CancelledError):
        raise
    except Exception as error:  # ucxx's classes come from C++ and have no public base class
        ours = translate(error)
        hint = ""
        if isinstance(ours, BusyPortError):
            hint = "; another program has the port, and port 0 takes a free one"
        elif isinstance(ours, WireNotAllowedError) and (chosen := os.environ.get("UCX_TLS")):
            hint = f"; this host has no transport of UCX_TLS={chosen}: unset or change it"
        raise type(ours)(f"{doing}: {ours}{hint}") from error
