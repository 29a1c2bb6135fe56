"""What UCX's libraries offer and UCXX's Python does not: which transports an endpoint uses (ucp_ep_query of libucp),
which memory a context knows (ucp_context_query), and letting go of cancelled requests.

The structures are those of ucp.h; UCX extends them only at their ends, guarded by the field mask.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from transport.errors import InternalError, LinkError


class _Lane(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Lanes(ctypes.Structure):
    _fields_ = (("entries", ctypes.c_void_p), ("count", ctypes.c_uint), ("entry_bytes", ctypes.c_size_t))


class _EndpointAttributes(ctypes.Structure):
    """ucp_ep_attr_t of UCX 1.12 and later (ucp.h); extended only at its end, guarded by field_mask."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_address", ctypes.c_char * 128),
        ("remote_address", ctypes.c_char * 128),
        ("lanes", _Lanes),
        ("user_data", ctypes.c_void_p),
    )


_FIELD_TRANSPORTS = 1 << 3
_MOST_LANES = 16


def _loaded(name: str) -> ctypes.CDLL:
    """A library that is already in this process: a second copy would not know its objects."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if f"/{name}" in path and ".so" in path:
            return ctypes.CDLL(path)
    raise InternalError(f"{name} is not mapped although ucxx is loaded")


@cache
def _libucp() -> ctypes.CDLL:
    return _loaded("libucp")


def query_transports(handle: int) -> list[tuple[str, str]]:
    """(transport, device) of every lane of the endpoint with this ucp_ep_h, e.g. ("tcp", "eth0").

    Raises LinkError when UCX does not answer.
    """
    lanes = (_Lane * _MOST_LANES)()
    attributes = _EndpointAttributes(field_mask=_FIELD_TRANSPORTS)
    attributes.lanes = _Lanes(ctypes.addressof(lanes), _MOST_LANES, ctypes.sizeof(_Lane))
    status = _libucp().ucp_ep_query(ctypes.c_void_p(handle), ctypes.byref(attributes))
    if status != 0:
        raise LinkError(f"UCX does not say which transports the endpoint uses (status {status})")
    return [
        ((lane.transport or b"").decode(), (lane.device or b"").decode()) for lane in lanes[: attributes.lanes.count]
    ]


# --- which memory a context knows ---------------------------------------------------------------------
class _ContextAttributes(ctypes.Structure):
    """ucp_context_attr_t, with room for what UCX adds at its end, guarded by field_mask."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("request_size", ctypes.c_size_t),
        ("thread_mode", ctypes.c_int),
        ("memory_types", ctypes.c_uint64),
        ("rest", ctypes.c_char * 256),
    )


_FIELD_MEMORY_TYPES = 1 << 2
_CUDA = 1 << 1  # UCS_MEMORY_TYPE_CUDA as a bit


def knows_cuda_memory(handle: int) -> bool:
    """Whether the context with this ucp_context_h tells CUDA memory from the host's; else UCX would crash in it.

    UCXX's `cuda_support` answers True for every context: it takes the type's number for its bit.
    """
    attributes = _ContextAttributes(field_mask=_FIELD_MEMORY_TYPES)
    status = _libucp().ucp_context_query(ctypes.c_void_p(handle), ctypes.byref(attributes))
    return status == 0 and bool(attributes.memory_types & _CUDA)


# --- what UCXX keeps of an endpoint that was closed -----------------------------------------------
@cache
def _drop_cancelled() -> Any:
    """libucxx's Endpoint::getCancelingSize, which lets go of cancelled requests that have completed."""
    function = getattr(_loaded("libucxx"), "_ZNK4ucxx8Endpoint16getCancelingSizeEv", None)
    if function is not None:
        function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_size_t
    return function


def forget_cancelled(endpoint: int) -> None:
    """Break UCXX's circle of a closed endpoint (its ucxx_ptr) and the requests that its closing cancelled.

    The circle would keep the worker with its threads and descriptors for the life of the process.
    """
    drop = _drop_cancelled()
    if drop is not None:
        drop(endpoint)
