"""The error tree: families, codes, and who may try again."""

from __future__ import annotations

from transport import errors
from transport.errors import TransportError

CLASSES = [found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, TransportError)]
FAMILIES = [
    errors.UsageError,
    errors.RefusedError,
    errors.LinkError,
    errors.RingError,
    errors.StoreError,
    errors.RunError,
    errors.InternalError,
]
ALONE = {
    TransportError,
    errors.PayloadDamagedError,
    errors.GivenUpError,
    errors.ClosedError,
    errors.MissingDependencyError,
    errors.OpenFilesError,
}


def test_every_error_has_a_family() -> None:
    assert [found for found in CLASSES if found not in ALONE and not issubclass(found, tuple(FAMILIES))] == []


def test_codes_on_the_wire_are_unique_and_stay_what_they_are() -> None:
    codes = {found.__name__: found.status for found in CLASSES if "status" in vars(found) and found.status}
    assert codes == {
        "StaleSlotError": 1,
        "WrongKeyError": 2,
        "WrongRingError": 3,
        "VersionMismatchError": 4,
        "AuthenticationError": 5,
        "RankError": 6,
        "LengthMismatchError": 7,
        "BusyError": 8,
        "ProtocolError": 9,
        "RingEndedError": 11,
    }


def test_what_may_be_tried_again() -> None:
    retryable = {found.__name__ for found in CLASSES if found.retryable}
    assert retryable >= {
        "LinkError",
        "UnreachableError",
        "ConnectionLostError",
        "ReadTimeoutError",
        "ChecksumError",
        "RetriesExhaustedError",
        "WrongRingError",
        "BusyError",
        "RingFullError",
    }
    assert not retryable & {
        "StaleSlotError",
        "WrongKeyError",
        "DeadlineExceededError",
        "PayloadLostError",
        "UsageError",
    }


def test_python_code_that_knows_nothing_of_us_can_catch_them() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.ReadTimeoutError, TimeoutError)
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
    assert issubclass(errors.MissingDependencyError, ImportError)


def test_an_error_that_is_not_public_has_a_public_base_besides_the_first() -> None:
    public = {getattr(errors, name) for name in errors.__all__} - {TransportError}
    alone = {found.__name__ for found in CLASSES if found is not TransportError and not public & set(found.__mro__)}
    assert alone == {"GivenUpError", "OpenFilesError"}  # which only say that the same call may succeed later
