"""Text of failures for a record, a message to another process, a database: making it cannot fail.

A failure that cannot be reported hides itself: the others then wait for their time limits. Names of files may hold
halves of surrogate pairs, which UTF-8 does not have; a framework's message may have megabytes; its ``__str__`` may
raise. Everything that reports a failure to another process makes the text here.
"""

from __future__ import annotations

from typing import Final

MOST_TEXT: Final = 4096  # characters


def encodable(text: str) -> str:
    """Return ``text`` with a question mark for each half of a surrogate pair, which no encoder takes."""
    return text.encode("utf-8", "replace").decode()


def reportable(text: str, most: int = MOST_TEXT) -> str:
    """Return ``text`` as every encoder takes it: without halves of surrogate pairs, cut to ``most`` characters."""
    return encodable(text if len(text) <= most else f"{text[: most - 1]}…")


def error_text(error: BaseException, most: int = MOST_TEXT) -> str:
    """Return the type and the message of an error, `reportable`."""
    try:
        message = str(error)
    except Exception as second:  # the framework's own defect; KeyboardInterrupt is none
        message = f"(its message cannot be read: {type(second).__name__})"
    return reportable(f"{type(error).__name__}: {message}" if message else type(error).__name__, most)
