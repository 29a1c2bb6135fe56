"""The finding of a check: a name, how it is, what was seen, and what to type about it."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. ``remedy`` can be typed, or is a change that is named exactly; empty where nothing is to be done."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Check:
    """Return a check that passed."""
    return Check(name=name, status="ok", detail=detail)


def warn(name: str, detail: str, remedy: str) -> Check:
    """Return a check of what works, but slower or with less than it could."""
    return Check(name=name, status="warn", detail=detail, remedy=remedy)


def fail(name: str, detail: str, remedy: str) -> Check:
    """Return a check of what does not work."""
    return Check(name=name, status="fail", detail=detail, remedy=remedy)
