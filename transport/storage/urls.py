"""Where a queue or a store is, as one line of text: ``sqlite:///path/of/file`` or ``redis://host:port/db?run=name``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit, urlunsplit

from transport.errors import ConfigurationError
from transport.runtime.arguments import expect
from transport.runtime.decoders import hiding

FORMS = "sqlite:file, relative, or sqlite:///path/of/file, or redis://host:port/db?run=name"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class SQLitePlace(NamedTuple):
    """A file of this host."""

    path: Path

    @property
    def text(self) -> str:
        """What `parse_place` makes this of."""
        return "sqlite://" + quote(str(self.path.absolute()))


@hiding("url")
class RedisPlace(NamedTuple):
    """A server, and the name that keeps its runs apart."""

    url: str  # as the redis package takes it
    run: str
    may_forget: bool = False  # whether a server is admitted that loses what it answered when it is killed


def has_scheme(text: str) -> bool:
    """Whether ``text`` begins as a place does, where a file's path alone is taken as well."""
    return _SCHEME.match(text) is not None


def parse_place(text: str) -> SQLitePlace | RedisPlace:
    """``text`` taken apart. ConfigurationError says what is wrong with it, and never shows its password.

    ``sqlite:file`` names a file relative to the working directory; ``rediss`` is Redis over TLS.
    """
    expect(text, str, "a place", f"a line of text: {FORMS}")
    try:
        parts = urlsplit(text)
        _ = parts.port  # parsed only when asked for
    except ValueError as error:
        raise ConfigurationError(f"a place that is no URL ({error}): give {FORMS}") from None
    if parts.scheme == "sqlite":
        if parts.netloc:  # two slashes; a third one before the name would lead to the root folder
            relative = SQLitePlace(Path(unquote(parts.netloc + parts.path)))
            raise ConfigurationError(
                f"{text!r} names no file but a host: give sqlite:{quote(str(relative.path))} for the file in "
                f"the working directory, which is {relative.text}"
            )
        if parts.query or parts.fragment or not parts.path.strip("/"):
            raise ConfigurationError(f"{text!r} names no file: give {FORMS}")
        return SQLitePlace(Path(unquote(parts.path)))
    if parts.scheme not in ("redis", "rediss"):
        raise ConfigurationError(f"a place of the kind {parts.scheme!r} is not known: give {FORMS}")
    if not parts.hostname:
        raise ConfigurationError(f"a {parts.scheme} place without a host: give {FORMS}")
    if not re.fullmatch(r"/?|/[0-9]+", parts.path):
        raise ConfigurationError(f"the database of a Redis place is a number, not {parts.path[1:]!r}: give {FORMS}")
    options = parse_qs(parts.query, keep_blank_values=True)
    runs = options.pop("run", [])
    forget = options.pop("may_forget", [])
    if forget not in ([], ["yes"]):
        raise ConfigurationError("write may_forget=yes, or nothing: it admits a server that loses what it has answered")
    if options or parts.fragment:
        unknown = ", ".join(sorted(options)) or "#" + parts.fragment
        raise ConfigurationError(f"a Redis place with the unknown option {unknown}: give run=name, may_forget=yes")
    if len(runs) != 1 or not _RUN.fullmatch(runs[0]):
        raise ConfigurationError(
            "a Redis place needs run=name, which keeps the runs of one server apart: 1 to 64 letters, digits, . _ -"
        )
    return RedisPlace(urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")), runs[0], bool(forget))
