"""How many examples a property is tried with: some with each change, many at night."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

_AT_NIGHT = 8  # times as many


def examples(count: int, **further: Any) -> settings:
    """Return the settings of a property that `make test` tries with ``count`` examples."""
    times = _AT_NIGHT if settings.get_current_profile_name() == "nightly" else 1
    return settings(max_examples=count * times, deadline=None, **further)


def choose_profile(*, nightly: bool) -> None:
    """Set how many examples a property has that does not say it."""
    # Two shared cores: a slow example is no defect, and the watchdog of pytest-timeout ends a stuck one.
    for name, count in (("day", 25), ("nightly", 25 * _AT_NIGHT)):
        settings.register_profile(name, deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("nightly" if nightly else "day")
