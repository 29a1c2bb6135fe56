"""All checks, in an order in which the first bad one mostly explains those after it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import msgspec

from transport.config import DEFAULT, Loaded, shown
from transport.doctor import cuda, host, infiniband, library, loopback, network
from transport.doctor.finding import Check, ok
from transport.errors import MissingDependencyError
from transport.wires import settings_for, user_settings


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The command's JSON."""

    checks: list[Check]

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(check.status == "fail" for check in self.checks)


def examine(
    loaded: Loaded, *, ring_bytes: int, connections: int, ports: Sequence[int], transfer: bool
) -> Iterator[Check]:
    """Every check, as soon as it is made.

    Args:
        ring_bytes: of the rings that are planned on this host.
        connections: to one listener, or from one client.
        ports: that are to be served; 0 is any.
        transfer: also read real payloads, which starts a listener process.
    """
    configuration = loaded.configuration
    rdma = "rdma" in configuration.wires or bool(infiniband.ports())
    yield settings(loaded)
    yield ucx_settings()
    plugins = _plugins()
    yield from library.checks(gpu=cuda.present())
    yield from infiniband.checks(asked="rdma" in configuration.wires, verbs="verbs" in (plugins or ()))
    yield from host.checks(ring_bytes, connections, rdma=rdma)
    yield from network.checks(configuration, ports)
    yield from cuda.checks()
    if transfer and plugins is not None:
        yield from loopback.checks(configuration, rdma=rdma and "verbs" in plugins)


def _plugins() -> set[str] | None:
    """None without UCX: then no transfer is tried, which would fail for the same reason."""
    from transport.wire import library as ucx

    try:
        return library.plugins(ucx.library_path())
    except MissingDependencyError:
        return None


def settings(loaded: Loaded) -> Check:
    """What differs from the defaults, and where each comes from."""
    changed = [
        f"{key}={shown(getattr(loaded.configuration, key))} ({source})"
        for key, source in loaded.sources.items()
        if source != DEFAULT
    ]
    total = len(loaded.sources)
    return ok("settings", f"{', '.join(changed) or 'none is set'}; {total - len(changed)} of {total} are defaults")


def ucx_settings() -> Check:
    """The UCX settings that this package chooses, and the user's variables that override them."""
    mine = [f"{name}={value} (chosen)" for name, value in sorted(settings_for().items())]
    theirs = [
        f"{name}={os.environ[f'UCX_{name}']} (UCX_{name})"
        for name in sorted(user_settings())
        if f"UCX_{name}" in os.environ
    ]
    return ok("ucx settings", ", ".join([*theirs, *mine]))
