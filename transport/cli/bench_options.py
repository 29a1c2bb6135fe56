"""Options that several commands of `transport bench` have."""

from __future__ import annotations

from transport.errors import UsageError

MOST_COUNT = 1024  # larger numbers are most likely typing mistakes


def check_device(name: str) -> None:
    """UsageError for another device than cuda, and whatever is wrong with that one."""
    from transport.devices.streams import require_device

    if name != "cuda":
        raise UsageError(f"--device {name}: choose cuda")
    require_device()


def counts(option: str, texts: str, most: int = MOST_COUNT) -> list[int]:
    """The whole numbers of a comma-separated list, ascending. UsageError for anything else."""
    try:
        counts = sorted({int(text) for text in texts.split(",")})
    except ValueError:
        raise UsageError(f"{option} {texts}: give whole numbers, separated by commas") from None
    if not 1 <= counts[0] <= counts[-1] <= most:
        raise UsageError(f"{option} {texts}: give numbers from 1 to {most}")
    return counts
