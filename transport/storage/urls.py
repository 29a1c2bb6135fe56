"""URLs of queues and stores: ``sqlite:///path/of/file`` or ``redis://host:port/db?run=name``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit, urlunsplit

from transport.errors import ConfigurationError
from transport.runtime.hiding import hiding

FORMS = "sqlite:file in this folder, sqlite:///path/of/file or redis://host:port/db?run=name"
_QUOTE = "in a password write %2F for /, %3F for ?, %23 for #, %5B for ["

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class SQLiteURL(NamedTuple):
    """A file of this host."""

    path: Path

    @property
    def text(self) -> str:
        """The URL as text, for `parse_url`."""
        return "sqlite://" + quote(str(self.path.absolute()))


@hiding("url")
class RedisURL(NamedTuple):
    """A server, and the name of a run on it."""

    url: str  # as the redis package takes it
    run: str
    may_forget: bool = False  # accept a server without append-only file, which forgets all when it is killed


def has_scheme(text: str) -> bool:
    """Return whether ``text`` begins with a URL's scheme, where a plain file path is allowed too."""
    return _SCHEME.match(text) is not None


def parse_url(text: str) -> SQLiteURL | RedisURL:
    """Parse ``text``. ConfigurationError says what is wrong with it, and never shows its password.

    ``sqlite:file`` names a file relative to the working directory; ``rediss`` is Redis over TLS.
    """
    try:
        parts = urlsplit(text)
    except ValueError:  # whose text may contain the password
        raise ConfigurationError(f"invalid URL: give {FORMS}; {_QUOTE}") from None
    if parts.scheme == "sqlite":
        if parts.netloc:  # two slashes; a third one before the name would lead to the root folder
            relative = SQLiteURL(Path(unquote(parts.netloc + parts.path)))
            raise ConfigurationError(
                f"{text!r} names a host instead of a file: give sqlite:{quote(str(relative.path))} for the file in "
                f"the working directory, which is {relative.text}"
            )
        if parts.query or parts.fragment or not parts.path.strip("/"):
            raise ConfigurationError(f"{text!r} names no file: give {FORMS}")
        return SQLiteURL(Path(unquote(parts.path)))
    if not parts.scheme:
        shown = "the URL" if "@" in text else repr(text)  # which may have a password
        raise ConfigurationError(f"{shown} has no scheme, such as sqlite: or redis: before it: give {FORMS}")
    if parts.scheme not in ("redis", "rediss"):
        raise ConfigurationError(f"unknown URL scheme {parts.scheme!r}: give {FORMS}")
    if "@" in parts.path + parts.query + parts.fragment:  # parts of a password, as nothing else there has one
        raise ConfigurationError(f"invalid {parts.scheme} URL: give {FORMS}; {_QUOTE}")
    try:
        _ = parts.port  # parsed only when asked for
    except ValueError as error:
        raise ConfigurationError(f"invalid URL ({error}): give {FORMS}") from None
    if not parts.hostname:
        raise ConfigurationError(f"{parts.scheme} URL without a host: give {FORMS}")
    if not re.fullmatch(r"/?|/[0-9]+", parts.path):
        raise ConfigurationError(f"the database in a Redis URL must be a number, got {parts.path[1:]!r}: give {FORMS}")
    options = parse_qs(parts.query, keep_blank_values=True)
    runs = options.pop("run", [])
    forget = options.pop("may_forget", [])
    if forget not in ([], ["yes"]):
        raise ConfigurationError(
            "give may_forget=yes, which accepts a server without append-only file, or omit may_forget"
        )
    if options or parts.fragment:
        unknown = ", ".join(sorted(options)) or "#" + parts.fragment
        raise ConfigurationError(f"unknown option {unknown} in a Redis URL: give run=name, may_forget=yes")
    if len(runs) != 1 or not _RUN.fullmatch(runs[0]):
        raise ConfigurationError("a Redis URL needs run=name, the name of the run: 1 to 64 letters, digits, . _ -")
    return RedisURL(urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")), runs[0], bool(forget))
