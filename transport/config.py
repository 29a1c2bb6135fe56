"""The operator's configuration: `transport.toml` and variables ``TRANSPORT_…``, for every command and mixin.

    read_timeout_s = 20.0            # transport.toml
    wires = ["shm", "tcp"]

    TRANSPORT_READ_TIMEOUT_S=20      # the same; lists are separated by commas

An argument or a command's option wins over the environment, that over the file, that over the default. The file is
the one that ``TRANSPORT_CONFIG`` names, else `transport.toml` in the current folder, else none. An unknown key, also in
the environment, is an error that names the nearest known one: a misspelt setting must not be a default unnoticed.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union

import msgspec

from transport.decoders import convert
from transport.errors import ConfigurationError
from transport.folders import expanded, in_working_folder
from transport.settings import DEFAULTS, LogFormat, LogLevel, OperatorSettings, Settings
from transport.wires import Wire

PREFIX: Final = "TRANSPORT_"
FILE_VARIABLE: Final = "TRANSPORT_CONFIG"
FILE_NAME: Final = "transport.toml"
DEFAULT: Final = "default"

_PASSWORD: Final = re.compile(r"(//[^/?#@:]*:).*@")  # up to the last @, since passwords may have one that is not quoted

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
RunName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{0,80}$", description="up to 80 letters, digits, . _ -")]
_BYTE: Final = r"(25[0-5]|2[0-4]\d|1?\d?\d)"
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_IPV6: Final = rf"(?=[^:]*:[^:]*:)[0-9A-Fa-f:]+(:({_BYTE}\.){{3}}{_BYTE})?"
# What ends in a number is an address: 10.0.0.300 is no name.
Address = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(({_BYTE}\.){{3}}{_BYTE}|{_IPV6}|({_LABEL}\.)*(?!\d+\.?$){_LABEL}\.?)$",
        description="IP addresses or names of hosts, without ports",
    ),
]


class Configuration(OperatorSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times and bounds of the links, and what belongs to one host or one process. Make it with `load`."""

    wires: tuple[Wire, ...] = ()
    bind: str = ""
    addresses: tuple[Address, ...] = ()
    secret_file: str = ""
    metrics_port: Port | None = None
    metrics_bind: str = "127.0.0.1"
    store: str = ""
    run: RunName = ""
    log_level: LogLevel = "WARNING"
    log_format: LogFormat = "text"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return every field for repr, the store without its password, which must not appear in a log."""
        return [(key, without_password(getattr(self, key))) for key in self.__struct_fields__]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.__rich_repr__())})"

    @property
    def settings(self) -> Settings:
        """The `Settings` that follow from it."""
        return Settings.derived(self)

    @property
    def wire_policy(self) -> Literal["auto"] | tuple[Wire, ...]:
        """The wires as a client takes them."""
        return self.wires or "auto"

    @property
    def server_wires(self) -> frozenset[Wire] | None:
        """The wires as a server takes them; None: whatever UCX finds best. Mapped payloads need no server."""
        return frozenset(self.wires) - {"mapped"} or None

    def secret(self) -> bytes | None:
        """Return the contents of ``secret_file`` without a last newline. ConfigurationError if it cannot be used."""
        if not self.secret_file:
            return None
        path = expanded(self.secret_file)
        try:
            secret = path.read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ConfigurationError(
                f"secret_file {path}: {error.strerror}; give the path of a readable file"
            ) from error
        if not secret:
            raise ConfigurationError(f"secret_file {path} is empty; write the shared secret into it")
        return secret


MEANINGS: Final[Mapping[str, str]] = {
    "read_timeout_s": "one attempt to read, before the time its bytes take; also a connection, and its handshake",
    "read_slowest_rate": "rate at which a payload's own time is reckoned",
    "batch_deadline_s": "a batch, or a single read without `timeout`, as a whole",
    "connections_per_listener": "connections that a listener admits",
    "linger_s": "how long listeners outlive a writer that left unread payloads; 0: they end with it",
    "claim_lease_s": "how long a claim on the queue is its claimant's without renewal; each queue when it is opened",
    "consumed_rings": "rings that a `ConsumedRecord` remembers",
    "staging_bytes": "pinned memory for payloads on their way to a device",
    "wires": "what may carry payloads, of mapped, shm, tcp, rdma, cuda; empty: whatever is best",
    "bind": "local address that listeners listen on; empty: all of one family, :: all of IPv6",
    "addresses": "what tickets advertise, IP addresses or names, best first; empty: chosen, see `transport doctor`",
    "secret_file": "file with the shared secret that clients and listeners prove to have; empty: none",
    "metrics_port": "port of the Prometheus metrics, 0: any free one; not set: no metrics",
    "metrics_bind": "local address of that port",
    "store": "URL of the store that `transport cooldown` uses; empty: a file in ~/.local/state",
    "run": "name by which rollouts and trainers of a host without a queue find each other; empty: SLURM's job, or all",
    "log_level": "DEBUG, INFO, WARNING, ERROR or CRITICAL",
    "log_format": "text, or json: an object per line with ticket, port and attempt as fields",
}
"""What each key bounds or says, for the tables of the documentation."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration and where each of its values comes from: a path, a variable, or "default"."""

    configuration: Configuration
    sources: Mapping[str, str]


def load(environment: Mapping[str, str] | None = None, folder: Path | None = None) -> Loaded:
    """Read file and environment.

    Args:
        environment: default that of the process.
        folder: where `transport.toml` is looked for; default the current one.

    Raises:
        ConfigurationError: a key is unknown, a value is not of its kind, values contradict each other, the file is no
            TOML, or the one that ``TRANSPORT_CONFIG`` names cannot be read.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Configuration.__struct_fields__, DEFAULT)
    path = _path(environment, folder)
    if path is not None:
        for key, value in _document(path).items():
            if isinstance(value, dict):
                raise ConfigurationError(f"{path}: [{key}] is a table; write the settings above it, without a table")
            _check_known(key, f"{path}: ", str)
            values[key] = _converted(key, value, f"{path}: {key}", strict=True)
            sources[key] = str(path)
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        key = variable.removeprefix(PREFIX).lower()
        _check_known(key, "environment: ", variable_of)
        values[key] = _converted(key, environment[variable], f"environment: {variable}", strict=False)
        sources[key] = variable
    configuration = Configuration(**values)
    if broken := configuration.settings.broken_rule():
        named = set(re.findall(r"\w+", broken))
        where = sorted({source for key, source in sources.items() if key in named and source != DEFAULT})
        raise ConfigurationError(f"{', '.join(where)}: {broken}")
    return Loaded(configuration=configuration, sources=sources)


def configuration() -> Configuration:
    """Return the configuration of this process, read anew. Raises as `load`."""
    return load().configuration


def lease_or_configured(lease_s: float | None) -> float:
    """Return what a caller gave for the lease of claims, else what the operator configured."""
    return configuration().claim_lease_s if lease_s is None else lease_s


def variable_of(key: str) -> str:
    """Return the environment variable of a key."""
    return f"{PREFIX}{key.upper()}"


def shown(value: object) -> str:
    """Return a value as one writes it in the environment, without passwords; what is not set is a dash."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    if isinstance(value, float):
        return f"{value:.15g}"
    return "-" if value is None or value == "" else str(without_password(value))


def without_password(value: Any) -> Any:
    """Return a setting's value; in place of the password in a URL there are three dots."""
    return _PASSWORD.sub(r"\1...@", value) if isinstance(value, str) else value


def _path(environment: Mapping[str, str], folder: Path | None) -> Path | None:
    if named := environment.get(FILE_VARIABLE):
        return expanded(named)
    if folder is None:
        return in_working_folder(FILE_NAME)
    found = folder / FILE_NAME
    return found if found.is_file() else None


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; {FILE_VARIABLE} must name a file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error


def _check_known(key: str, where: str, spelt: typing.Callable[[str], str]) -> None:
    known = Configuration.__struct_fields__
    if key in known:
        return
    near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.6)
    advice = f"did you mean {spelt(near[0])}?" if near else "`transport doctor --settings` lists the known ones"
    raise ConfigurationError(f"{where}{spelt(key)} is not a setting; {advice}")


def _converted(key: str, value: Any, where: str, *, strict: bool) -> Any:
    """Return the value in its field's type; ``strict=False``: from the text of an environment variable."""
    kind = _TYPES[key]
    several = typing.get_origin(kind) is tuple
    if strict and several and isinstance(value, str):
        raise ConfigurationError(f'{where}={value!r}: give a list, {key} = ["{value}"]')
    if not strict and several:
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif not strict and value.strip() == "" and _may_be_none(kind):
        value = None
    try:
        converted: Any = convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        given, wanted = repr(value) if strict else _shown(value), _wanted(kind, strict) or str(error)
        raise ConfigurationError(f"{where}={given}: {wanted}".replace(" - at `$`", "")) from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigurationError(f"{where}={value!r}: give a finite number")
    return converted


def _shown(value: Any) -> str:
    """Return the text that would stand in the environment."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _wanted(kind: Any, strict: bool) -> str:
    """Return what a value of this type is, in words; "" where only the error says it. ``strict``: in a file."""
    several = typing.get_origin(kind) is tuple
    inner, bounds, described = (typing.get_args(kind)[0] if several else kind), "", ""
    while typing.get_origin(inner) in (Annotated, Union, types.UnionType):
        inner, *metas = [each for each in typing.get_args(inner) if each is not type(None)]
        for meta in metas:
            if isinstance(meta, msgspec.Meta) and meta.ge is not None and meta.le is not None:
                bounds = f" from {meta.ge} to {meta.le}"
            if isinstance(meta, msgspec.Meta) and meta.description:
                described = f"give {meta.description}"
    if typing.get_origin(inner) is Literal:
        choices = ", ".join(map(str, typing.get_args(inner)))
        if several:
            return f"choose some of {choices}{'' if strict else ', separated by commas'}"
        return f"choose one of {choices}"
    numbers = {int: f"give a whole number{bounds}", float: f"give a number{bounds}"}
    return described or ("" if several else numbers.get(inner, ""))


def _may_be_none(kind: Any) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType) and type(None) in typing.get_args(kind)


_TYPES: Final[Mapping[str, Any]] = typing.get_type_hints(Configuration, include_extras=True)


assert Configuration().settings == DEFAULTS
