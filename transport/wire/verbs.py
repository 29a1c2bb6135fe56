"""UCX with verbs, out of the wheel nixl-cu12 or nixl-cu13, in place of the UCX that ucxx's own wheels bring.

Those have no verbs. nixl's wheel has, under names that auditwheel has made unique: libucp-b39b3ed9.so.0.0.0, where ucxx
and the engine ask for libucp.so.0. The plain names are shorter, so in copies they are written over the unique ones.
libibverbs and libmlx5, which the wheel has as well, thereby become the host's, which fit the host's providers. The
copies lie in the user's cache folder, one set for each release and architecture.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from transport.errors import ConfigurationError
from transport.folders import kept
from transport.runtime.durable import write_whole
from transport.runtime.installing import install
from transport.wire.addresses import active_ports

if TYPE_CHECKING:
    from importlib.metadata import Distribution

CHOICE: Final = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"  # the variable of ucxx's loader: which UCX it takes
PROVIDERS: Final = "apt-get install libibverbs1 ibverbs-providers"
_EXTRAS: Final = {"cu12": "verbs", "cu13": "verbs13"}
_LIBRARIES: Final = ("libucs.so.0", "libuct.so.0", "libucp.so.0")  # in the order in which they are loaded
_NEEDED: Final = ("libucm.so.0", *_LIBRARIES, "ucx/libuct_ib.so.0")
_USEFUL: Final = tuple(f"ucx/{name}.so.0" for name in ("libuct_ib_mlx5", "libuct_cma", "libuct_cuda", "libucm_cuda"))
_UNIQUE: Final = re.compile(rb"(lib\w+)(?:-[0-9a-f]{8})?(\.so\.\d+)(?:\.\d+)+\0")


class Lack(NamedTuple):
    """A lack of this process for a UCX with verbs, and what to type about it."""

    why: str
    remedy: str


def loaded_library() -> Path | None:
    """Return the file of the libucp that this process has loaded."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith("libucp.so"):
            return Path(path)
    return None


def load() -> Lack | None:
    """Load it where a port is ACTIVE, and have ucxx's loader take it; return what is lacking.

    What the user has chosen stays: the UCX that the process has already, that of conda, and what `CHOICE` says.
    """
    if not active_ports():
        return Lack("no port is ACTIVE", "ibstat")
    own = "a UCX --with-verbs, see docs/INFINIBAND.md"
    if CHOICE in os.environ:
        return Lack(f"{CHOICE} is set, and the UCX that it chooses has no verbs", f"unset {CHOICE}; or {own}")
    if find_spec("libucx") is None:
        return Lack("ucxx came without the wheel libucx, and its UCX has no verbs", own)
    if there := loaded_library():
        return Lack(f"{there} was loaded before this package was used", "import ucxx after the first client or server")
    variants = sorted(_EXTRAS, key=lambda variant: _installed(f"ucxx-{variant}") is None)
    wheel = next(filter(None, (_installed(f"nixl-{variant}") for variant in variants)), None)
    installation = install(_EXTRAS[variants[0]], "--no-deps")  # its libraries alone are used; it asks for torch
    if wheel is None:
        return Lack("the UCX of ucxx's wheels has no verbs, and nixl's is not installed", installation)
    return _load(wheel, installation)


def provided_devices() -> set[str]:
    """Return the RDMA devices for which libibverbs has a provider; none where there is no libibverbs."""
    try:
        ibverbs = ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return set()
    ibverbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    ibverbs.ibv_get_device_name.restype = ctypes.c_char_p
    ibverbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    count = ctypes.c_int(0)
    if devices := ibverbs.ibv_get_device_list(ctypes.byref(count)):
        names = {os.fsdecode(ibverbs.ibv_get_device_name(devices[number])) for number in range(count.value)}
        ibverbs.ibv_free_device_list(devices)
        return names
    return set()


def _installed(name: str) -> Distribution | None:
    from importlib.metadata import PackageNotFoundError, distribution  # a tenth of every process's start otherwise

    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _load(wheel: Distribution, installation: str) -> Lack | None:
    name = f"{wheel.name} {wheel.version}"
    files = _files(wheel)
    if missing := [each for each in _NEEDED if each not in files]:
        return Lack(f"{name} is not laid out as expected: no {', '.join(missing)} in it", installation)
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return Lack(f"the UCX of {name} needs libibverbs: {error}", PROVIDERS)
    try:
        folder = _folder() / f"{wheel.name}-{wheel.version}-{platform.machine()}"
        _copy(files, folder)
    except (OSError, ConfigurationError) as error:  # ConfigurationError: the user has no home
        return Lack(f"the UCX of {name} cannot be copied: {error}", "export XDG_CACHE_HOME=…, a folder to write to")
    try:
        libraries = [ctypes.CDLL(str(folder / each)) for each in (*_LIBRARIES, "ucx/libuct_ib.so.0")]
    except OSError as error:  # the host's libibverbs is too old, or nothing may be executed in the folder
        return Lack(f"the UCX of {name} cannot be loaded: {error}", f"{PROVIDERS}; export XDG_CACHE_HOME=…")
    import libucx

    libucx.load_library = lambda: libraries  # what ucxx calls, which would load its own by their paths
    return None


def _files(wheel: Distribution) -> dict[str, Path]:
    """Return the wheel's files of UCX by the names that their copies have."""
    libraries = Path(str(wheel.locate_file(f"{wheel.name.replace('-', '_')}.libs")))
    found = {}
    for file in [*libraries.glob("libuc*.so.*"), *libraries.glob("ucx/libuc*.so.*")]:
        plain = _with_plain_names(os.fsencode(file.name) + b"\0").rstrip(b"\0")
        found[str(file.relative_to(libraries).with_name(os.fsdecode(plain)))] = file
    return {name: found[name] for name in (*_NEEDED, *_USEFUL) if name in found}


def _folder() -> Path:
    return kept("XDG_CACHE_HOME", ".cache") / "payload-transport"


def _copy(files: dict[str, Path], folder: Path) -> None:
    """Copy what ``folder`` lacks. Others may do the same at the same time."""
    for name, file in files.items():
        target = folder / name
        if not (target.is_file() and target.stat().st_size == file.stat().st_size):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, [_with_plain_names(file.read_bytes())])


def _with_plain_names(content: bytes) -> bytes:
    return _UNIQUE.sub(lambda found: (found[1] + found[2]).ljust(len(found[0]), b"\0"), content)
