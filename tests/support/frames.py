"""Messages as bytes, and strategies that make them."""

from __future__ import annotations

from hypothesis import strategies as st

from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Kind, Proof, Record, Welcome

NONCE = bytes(range(16))
BIG = 0xFEDCBA9876543210

RECORDS: dict[str, tuple[Record, str]] = {
    "read": (
        Record(Kind.READ, slot=17, generation=42, rank=3, key=BIG, length=132),
        "20 03 0000 11000000 2a000000 00000000 1032547698badcfe 8400000000000000",
    ),
    "ack": (
        Record(Kind.ACK, slot=17, generation=42, rank=15, key=BIG),
        "21 0f 0000 11000000 2a000000 00000000 1032547698badcfe 0000000000000000",
    ),
    "discard": (
        Record(Kind.DISCARD, slot=0x3FFFFFFF, generation=0x3FFFFFFF, key=1),
        "22 00 0000 ffffff3f ffffff3f 00000000 0100000000000000 0000000000000000",
    ),
    "state": (
        Record(Kind.STATE, slot=1, generation=2, rank=1, key=3),
        "23 01 0000 01000000 02000000 00000000 0300000000000000 0000000000000000",
    ),
    "bye": (Record(Kind.BYE), "24" + "00" * 31),
    "take": (
        Record(Kind.TAKE, slot=32, generation=500, rank=2, key=BIG, length=1 << 20, attempts=7, joined_most=4096),
        "25 02 0700 20000000 f4010000 00100000 1032547698badcfe 0000100000000000",
    ),
    "finish": (
        Record(Kind.FINISH, slot=17, generation=42, rank=3, attempts=2),
        "26 03 0200 11000000 2a000000 00000000 0000000000000000 0000000000000000",
    ),
    "give back": (
        Record(Kind.GIVE_BACK, slot=17, generation=42, rank=3, attempts=2, length=250),
        "27 03 0200 11000000 2a000000 00000000 0000000000000000 fa00000000000000",
    ),
    "cancel take": (Record(Kind.CANCEL_TAKE, slot=9), "28 00 0000 09000000" + "00" * 24),
    "renew": (Record(Kind.RENEW), "29" + "00" * 31),
    "outcome": (
        Record(Kind.OUTCOME, slot=17, generation=42, rank=3, attempts=2, key=BIG),
        "2a 03 0200 11000000 2a000000 00000000 1032547698badcfe 0000000000000000",
    ),
    "end": (
        Record(Kind.END, slot=17, generation=42, rank=3, attempts=2, joined_most=1, key=5 << 32 | 7),
        "2b 03 0200 11000000 2a000000 01000000 0700000005000000 0000000000000000",
    ),
    "give back unread": (
        Record(Kind.GIVE_BACK, slot=17, generation=42, rank=3, attempts=2, joined_most=1),
        "27 03 0200 11000000 2a000000 01000000 0000000000000000 0000000000000000",
    ),
}

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)

words = st.text(st.characters(codec="utf-8"), max_size=40)
features = st.lists(words, max_size=3).map(tuple)
versions = st.integers(-(2**63), 2**64 - 1)
handshakes = st.one_of(
    st.builds(
        Hello,
        oldest=versions,
        newest=versions,
        ring=words,
        tag_base=u32,
        nonce=st.binary(min_size=16, max_size=16),
        features=features,
    ),
    st.builds(Challenge, nonce=st.binary(min_size=16, max_size=16), proof=st.binary(max_size=32), version=versions),
    st.builds(Proof, proof=st.binary(max_size=32)),
    st.builds(
        Welcome,
        version=versions,
        ring=words,
        tag_base=u32,
        ports=st.lists(st.integers(1, 65535), max_size=16).map(tuple),
        inline_limit=st.integers(0, frames.MOST_INLINE),
        features=features,
        code=st.integers(0, 255),
        reason=words,
    ),
)
