"""A received payload in the hands of its reader: copies and pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from transport import Schema, UpTo
from transport.errors import ClosedError
from transport.testing import LocalTransport

SCHEMA = Schema.of(tokens=("int32", UpTo(16)), reward="float32")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda payload: pickle.loads(pickle.dumps(payload))])
def test_a_payload_is_copied_as_its_arrays_which_outlive_the_slot(
    duplicate: Callable[[object], Mapping[str, np.ndarray]],
) -> None:
    with LocalTransport(SCHEMA, slots=1) as local:
        with local.client.read(local.write({"tokens": np.arange(3, dtype=np.int32), "reward": 2.0})) as payload:
            made = duplicate(payload)
        local.write({"tokens": np.full(16, 9, np.int32), "reward": 9.0})  # into the same slot
        assert type(made) is dict
        assert made["tokens"].tolist() == [0, 1, 2]
        assert (made["tokens"].dtype, made["reward"].dtype) == (np.int32, np.float32)
        assert made["tokens"].flags.writeable
        with pytest.raises(ClosedError):
            duplicate(payload)


def test_a_field_that_a_payload_has_not_is_answered_with_those_it_has() -> None:
    with LocalTransport(SCHEMA, slots=1) as local:
        payload = local.client.read(local.write({"tokens": np.arange(3, dtype=np.int32), "reward": 2.0}))
        with pytest.raises(KeyError, match="token; the fields are tokens, reward"):
            payload["token"]
        assert payload.get("token") is None
        payload.release()
