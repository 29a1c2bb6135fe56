"""Who uploads an epoch's checkpoint: a third of its clients, chosen by a seeded permutation. Pure.

Every party computes the election alone from (algorithm, seed, epoch, clients) and gets the same, whatever its machine,
its Python, and the order in which clients arrived. Algorithm 1, in integers of 64 bits, all sums and products modulo
2**64:

1. The clients' names without duplicates, in the order of their UTF-8 bytes, are ``a[0] .. a[n-1]``.
2. The generator is SplitMix64. Its state begins as ``mix(seed) xor epoch``; each number adds ``0x9E3779B97F4A7C15`` to
   the state and is ``mix(state)``, where mix(z) is::

       z = (z xor (z >> 30)) * 0xBF58476D1CE4E5B9
       z = (z xor (z >> 27)) * 0x94D049BB133111EB
       z =  z xor (z >> 31)

3. ``draw(b)`` takes numbers until one is not below ``2**64 mod b``, and returns it modulo b: no remainder is favoured.
4. For i = 0 .. k-1, with k = clamp(n // 3, 1, 16): exchange ``a[i]`` and ``a[i + draw(n - i)]`` (Fisher-Yates from the
   front). Elected are ``a[0] .. a[k-1]``.

The algorithm's number is stored with the epoch; another algorithm gets another number, and this one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from transport.errors import UsageError

ALGORITHM: Final = 1
LEAST: Final = 1
MOST: Final = 16
SHARE: Final = 3  # one of so many

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def checkpointers(clients: int) -> int:
    """How many of ``clients`` clients are elected; 0 of 0."""
    return min(max(clients // SHARE, LEAST), MOST) if clients else 0


def elect(clients: Iterable[str], *, seed: int, epoch: int, algorithm: int = ALGORITHM) -> tuple[str, ...]:
    """The elected clients, in the order in which they were drawn.

    Raises:
        UsageError: unknown algorithm, or seed or epoch outside 0 .. 2**64 - 1.
    """
    if algorithm != ALGORITHM:
        raise UsageError(
            f"election algorithm mismatch: the record has {algorithm}, this build has {ALGORITHM}; "
            "run one build everywhere"
        )
    if not (0 <= seed <= _MASK and 0 <= epoch <= _MASK):
        raise UsageError(f"election with seed={seed}, epoch={epoch}: give 0 to 2**64 - 1")
    names = sorted(set(clients), key=lambda name: name.encode())
    draw = _drawing(_mix(seed) ^ epoch)
    elected = checkpointers(len(names))
    for at in range(elected):
        other = at + draw(len(names) - at)
        names[at], names[other] = names[other], names[at]
    return tuple(names[:elected])


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _drawing(state: int) -> Callable[[int], int]:
    """A generator that begins in ``state``; its result for b is one of 0 .. b-1, each as likely."""

    def draw(bound: int) -> int:
        nonlocal state
        while True:
            state = (state + _GOLDEN) & _MASK
            number = _mix(state)
            if number >= 2**64 % bound:
                return number % bound

    return draw
