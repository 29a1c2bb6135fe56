"""All checks, in an order in which the first bad one mostly explains those after it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from transport.config import DEFAULT, Loaded, shown
from transport.doctor import cuda, host, infiniband, library, loopback, network
from transport.doctor.finding import Check, ok
from transport.errors import MissingDependencyError
from transport.runtime.progress import Progress, silent
from transport.wire.verbs import Lack
from transport.wires import settings_for, user_settings

_LIBRARY, _TRANSFERS = 2, 7  # places of these groups


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The command's JSON."""

    checks: list[Check]

    @property
    def failed(self) -> bool:
        """True if any check failed."""
        return any(check.status == "fail" for check in self.checks)


def examine(
    loaded: Loaded,
    *,
    ring_bytes: int,
    connections: int,
    ports: Sequence[int],
    transfer: bool,
    progress: Progress = silent,
) -> Iterator[Check]:
    """Every check, as soon as it is made; ``progress`` counts groups of them, of which a transfer takes longest.

    Args:
        ring_bytes: of the rings that are planned on this host.
        connections: to one listener, or from one client.
        ports: that are to be served; 0 is any.
        transfer: also read real payloads, which starts a listener process.
    """
    configuration = loaded.configuration
    rdma = "rdma" in configuration.wires or bool(infiniband.ports())
    usable, lack = _ucx()
    groups: list[Iterable[Check]] = [
        infiniband.lacking(lack),
        (check for check in (settings(loaded), ucx_settings())),
        library.checks(gpu=cuda.present()),
        infiniband.checks(asked="rdma" in configuration.wires),
        host.checks(ring_bytes, connections, rdma=rdma),
        network.checks(configuration, ports),
        cuda.checks(),
    ]
    total = len(groups)
    if transfer and usable:
        wires = loopback.wires(rdma=rdma and lack is None)
        before, total = total, total + 1 + len(wires)  # a listener, and a transfer by each
        groups.append(loopback.checks(configuration, wires, lambda done: progress(before + done, total, 0)))
    bad = False
    for done, group in enumerate(groups):
        progress(done, total, 0)
        if done == _TRANSFERS and bad:  # what stops UCX stops every transfer, and was said
            break
        for check in group:
            bad |= done == _LIBRARY and check.status == "fail"
            yield check
    progress(total, total, 0)


def _ucx() -> tuple[bool, Lack | None]:
    """Return whether UCX can be loaded, without which no transfer is tried; and why it has no verbs."""
    from transport.wire import library as ucx

    try:
        return True, ucx.lack_of_verbs()
    except MissingDependencyError:
        return False, None


def settings(loaded: Loaded) -> Check:
    """List the settings that differ from the defaults, and where each comes from."""
    changed = [
        f"{key}={shown(getattr(loaded.configuration, key))} ({source})"
        for key, source in loaded.sources.items()
        if source != DEFAULT
    ]
    total = len(loaded.sources)
    return ok("settings", f"{', '.join(changed) or 'none is set'}; {total - len(changed)} of {total} are defaults")


def ucx_settings() -> Check:
    """Return the UCX settings that this package chooses, and the user's variables that override them."""
    mine = [f"{name}={value} (chosen)" for name, value in sorted(settings_for().items())]
    theirs = [
        f"{name}={os.environ[f'UCX_{name}']} (UCX_{name})"
        for name in sorted(user_settings())
        if f"UCX_{name}" in os.environ
    ]
    return ok("ucx settings", ", ".join([*theirs, *mine]))
