"""The meaning of torchrun's arguments for the rendezvous, and the text at its end. No torch, hardly any I/O."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import parse_qs, quote, urlsplit

from transport.errors import ConfigurationError
from transport.rendezvous.records import Closing, Reason
from transport.rendezvous.rules import Rules
from transport.storage.urls import RedisURL, SQLiteURL, parse_url

BACKEND = "transport"  # on torchrun's command line
LEASE_S = 25.0  # a store that is away for 20 s, and comes back, ends no round: renewals are 3 s apart
NO_ID = "none"  # what torchrun passes without --rdzv-id

_SECONDS = ("lease_s", "poll_s", "join_timeout_s", "last_call_s", "store_patience_s")
_ALIASES = {"join_timeout": "join_timeout_s", "last_call_timeout": "last_call_s"}  # as the backend c10d calls them
_IGNORED = {"timeout", "rank"}  # torchrun adds these
_OTHERS = ("most_rounds", "grow", "archive", "where")
_UNFIT = re.compile(r"[^A-Za-z0-9._-]")
_MOST_RUN = 64
_REACH_S = 5.0  # to reach this host from itself


class RendezvousOptions(NamedTuple):
    """One agent's part of a run. ``where`` is its position in the network, empty where ranks do not follow it."""

    run: str
    url: RedisURL | SQLiteURL
    rules: Rules
    archive: Path | None
    where: str
    warning: str = ""


def options_of(
    endpoint: str,
    run_id: str,
    least: int,
    most: int,
    conf: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    host: str,
) -> RendezvousOptions:
    """Return the options of torchrun's arguments. ConfigurationError says which argument is wrong, and what to give."""
    given = {_ALIASES.get(name, name): value for name, value in conf.items() if name not in _IGNORED}
    unknown = sorted(set(given) - {*_SECONDS, *_OTHERS})
    if unknown:
        known = ", ".join((*_SECONDS, *_OTHERS))
        raise ConfigurationError(f"--rdzv-conf has the unknown name {unknown[0]!r}; it takes {known}")
    named = _named_run(endpoint)
    run_id = run_id or NO_ID
    run = run_name(named if run_id == NO_ID and named else run_id)
    archive = given.get("archive")
    if archive == "":
        raise ConfigurationError("--rdzv-conf archive=: give the path of a file")
    rules = Rules(
        least=least,
        most=most,
        lease_s=LEASE_S,
        done_stays=True,
        grow=_flag("grow", given.get("grow", "1")),
        most_rounds=_whole("most_rounds", given["most_rounds"]) if "most_rounds" in given else None,
    )
    times = {name: _seconds(name, given[name]) for name in _SECONDS if name in given}
    last_call_s = min(
        times.get("last_call_s", rules.last_call_s), times.get("join_timeout_s", rules.join_timeout_s) / 2
    )
    times["last_call_s"] = last_call_s
    return RendezvousOptions(
        run=run,
        url=url_of(endpoint, run),
        rules=_replaced(rules, times),
        archive=None if archive is None else Path(str(archive)),
        where=where_of(str(given["where"]), environ, host) if "where" in given else "",
        warning=""
        if run_id != NO_ID or named
        else "there is no --rdzv-id: agents of other jobs with this endpoint "
        f"would join this run, which is called {NO_ID!r}, and it can be used once",
    )


def _replaced(rules: Rules, times: Mapping[str, float]) -> Rules:
    import msgspec

    return msgspec.structs.replace(rules, **times)


# --- the endpoint ---------------------------------------------------------------------------------------
def run_name(run_id: str) -> str:
    """``run_id``, or, where it has other characters or is too long, a name that stands for it and no other."""
    if run_id and not _UNFIT.search(run_id) and len(run_id) <= _MOST_RUN:
        return run_id
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:12]
    return f"{_UNFIT.sub('-', run_id)[: _MOST_RUN - 13]}-{digest}"


def url_of(endpoint: str, run: str) -> RedisURL | SQLiteURL:
    """Return the store that --rdzv-endpoint names. A Redis URL without ``?run=`` gets the run's name."""
    text = endpoint.strip()
    if not text:
        raise ConfigurationError("give --rdzv-endpoint=redis://host:6379/0, or sqlite:/path/of/file for one host")
    if "://" not in text and not text.startswith("sqlite:"):
        credentials, at, place = text.rpartition("@")
        shown = f"{'...' if credentials else ''}{at}{place}"
        raise ConfigurationError(
            f"--rdzv-endpoint={shown} is no URL: give redis://{shown}/0 for a Redis server there, or "
            f"sqlite:/path/of/file"
        )
    try:
        if text.startswith(("redis://", "rediss://")) and not _named_run(text):
            text += ("&" if urlsplit(text).query else "?") + "run=" + quote(run)
        return parse_url(text)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(f"--rdzv-endpoint: {error}") from None


def _named_run(endpoint: str) -> str:
    try:
        runs = parse_qs(urlsplit(endpoint.strip()).query).get("run", [])
    except ValueError:  # url_of says what is wrong
        return ""
    return runs[0] if runs else ""


def own_address(url: RedisURL | SQLiteURL, local_addr: str | None) -> str:
    """Return the address that other agents reach this host by: --local-addr, or that of the way to the Redis server.

    On the server's own host that may be loopback; other hosts then reach it by the name in the endpoint.
    """
    if local_addr:
        return local_addr
    if isinstance(url, SQLiteURL):
        return "127.0.0.1"  # the members of a file are on one host
    parts = urlsplit(url.url)
    server = parts.hostname or "127.0.0.1"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(server, parts.port or 6379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing; chooses the interface
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(f"--rdzv-endpoint: no way to host {server!r} ({error}); check the name") from None
    return server if ipaddress.ip_address(own).is_loopback else own


def check_address(address: str) -> None:
    """Raise ConfigurationError unless this host reaches itself at the address. torch's store would try for minutes."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server, socket.socket(family, kind, protocol) as probe:
            server.bind(("", 0))
            server.listen(1)
            probe.settimeout(_REACH_S)
            probe.connect((target[0], server.getsockname()[1]))
    except OSError as error:
        raise ConfigurationError(
            f"this host does not reach itself at {address!r} ({error}), so that its workers and other hosts would not "
            "either; give --local-addr one of its own addresses or names"
        ) from None


# --- the position in the network --------------------------------------------------------------------------
def where_of(
    source: str, environ: Mapping[str, str], host: str, read: Callable[[Path], str] = lambda path: path.read_text()
) -> str:
    """Return this host's position, by ``--rdzv-conf where=…``, as a path such as "switch1/rack3/host7".

    ``slurm``: SLURM's variables. ``env:NAME``: a variable. ``file:PATH``: a list of hosts, one a line, in the order of
    ranks. ``at:PATH``: the position itself.
    """
    kind, _, value = source.partition(":")
    if kind == "slurm":
        path = environ.get("SLURM_TOPOLOGY_ADDR", "").replace(".", "/") or environ.get("SLURM_NODEID", "")
        if not path:
            raise ConfigurationError(
                "where=slurm: neither SLURM_TOPOLOGY_ADDR nor SLURM_NODEID is set; start torchrun by srun"
            )
        return path
    if kind == "env" and value:
        if not environ.get(value):
            raise ConfigurationError(f"where=env:{value}: the variable {value} is not set; set it on every host")
        return environ[value]
    if kind == "at" and value:
        return value
    if kind == "file" and value:
        return _line_of(Path(value), host, read)
    raise ConfigurationError(
        f"where={source}: give where=slurm, where=env:VARIABLE, where=file:LIST_OF_HOSTS or where=at:rack3/host7"
    )


def _line_of(path: Path, host: str, read: Callable[[Path], str]) -> str:
    try:
        lines = [line.split("#")[0].strip() for line in read(path).splitlines()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"where=file:{path}: cannot read it ({why})") from None
    hosts = [line for line in lines if line]
    for name in (host, host.partition(".")[0]):
        if name in hosts:
            return f"{hosts.index(name)}/{name}"
    raise ConfigurationError(f"where=file:{path}: this host, {host}, is not in the list; add a line for it")


# --- values -----------------------------------------------------------------------------------------------
def _seconds(name: str, value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ConfigurationError(f"--rdzv-conf {name}={value}: give a number") from None


def _whole(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ConfigurationError(f"--rdzv-conf {name}={value}: give a whole number") from None


def _flag(name: str, value: object) -> bool:
    text = str(value).lower()
    if text not in ("0", "1", "true", "false"):
        raise ConfigurationError(f"--rdzv-conf {name}={value}: give 1 or 0")
    return text in ("1", "true")


# --- the run's end ----------------------------------------------------------------------------------------
def exit_with(code: int, line: str) -> NoReturn:
    """End the agent: torchrun passes SystemExit on, where every other exception gets a traceback of its own."""
    print(f"torchrun --rdzv-backend={BACKEND}: {line}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def ended(run: str, closing: Closing, *, before: bool) -> str:
    """Return the line for an operator. ``before``: the run was closed before this agent came."""
    line = f"run {run!r} ended in round {closing.round}: {closing.reason} ({closing.message or 'no message'})"
    return f"{line}. An ended run stays ended; give another --rdzv-id for a new one" if before else line


class EndVerdict(NamedTuple):
    """The meaning of this agent's end for the run."""

    done: bool = False  # its workers are done; the run's end is the agent's
    reason: Reason | None = None  # the run ends with it
    message: str = ""


def verdict(failures: Mapping[int, int] | None, *, interrupted: bool, no_restart: int, host: str) -> EndVerdict:
    """``failures``: exit codes of failed workers by rank; None: none failed. ``interrupted``: by another error.

    An agent that fails for a reason of its own leaves, and a spare can replace it. An agent whose workers failed has no
    restarts left, which ends the run.
    """
    if failures is None:
        return EndVerdict() if interrupted else EndVerdict(done=True)
    final = {rank: code for rank, code in failures.items() if code == no_restart}
    rank, code = next(iter({**final, **failures}.items()))
    reason = Reason.NO_RESTART if final else Reason.FAILURE
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    return EndVerdict(reason=reason, message=f"worker of rank {rank} on {host} ended with {what}, no restart is left")
