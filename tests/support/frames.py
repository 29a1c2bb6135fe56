"""Messages as bytes, and strategies that make them."""

from __future__ import annotations

from hypothesis import strategies as st

from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Proof, Welcome

NONCE = bytes(range(16))
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
