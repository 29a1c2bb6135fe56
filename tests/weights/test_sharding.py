"""The plan of a sharded transfer: over random shardings each receiver gets every byte once, as numpy says it should."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from properties import examples
from random_shardings import model, random_sharding
from shard_members import local

from transport.errors import ProtocolError, SchemaError, UsageError
from transport.schema import DTYPES, TensorSpec
from transport.weights.sharding import shards
from transport.weights.sharding.boxes import Box, BoxIndex, left_over
from transport.weights.sharding.buckets import buckets_of, size_of, view
from transport.weights.sharding.layouts import Layout, LocalTensor, Piece
from transport.weights.sharding.plan import ShardPart, make_plan
from transport.weights.sharding.roles import RankRole, ShardDescription, pack, roles, unpack

RANDOM_SHARDINGS = 250


def carried(
    plan: Sequence[ShardPart],
    senders: Sequence[Layout],
    receivers: Sequence[Layout],
    tensors: dict[str, Any],
    bucket_bytes: int,
) -> list[dict[str, np.ndarray[Any, Any]]]:
    """What the plan brings to every receiver, through buckets; and every byte was written once."""
    have = [list(local(layout, tensors).values()) for layout in senders]
    got: list[dict[str, Any]] = [
        {each.name: np.zeros(each.shape, DTYPES[each.dtype]) for each in layout.tensors} for layout in receivers
    ]
    for part in plan:
        dtypes = [tensor.dtype for tensor in part.tensors]
        rows = [np.zeros(tensor.shape, DTYPES[tensor.dtype]) for tensor in part.tensors]
        writes = [np.zeros(tensor.shape, np.uint8) for tensor in part.tensors]
        for stream in part.streams:
            for bucket in buckets_of(stream.slices, dtypes, bucket_bytes):
                memory = np.zeros(size_of(bucket), np.uint8)
                assert len(memory) <= bucket_bytes
                for piece, at, nbytes in bucket:
                    source = view(have[stream.sender][piece.source], piece.source_start, piece.size)
                    memory[at : at + nbytes] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
                for piece, at, nbytes in bucket:
                    target = view(rows[piece.target], piece.target_start, piece.size)
                    target[...] = memory[at : at + nbytes].view(target.dtype).reshape(target.shape)
                    view(writes[piece.target], piece.target_start, piece.size)[...] += 1
        assert all((each == 1).all() for each in writes)
        for receiver in part.receivers:
            for tensor, row in zip(part.tensors, rows, strict=True):
                got[receiver][tensor.name] = row
    return got


def check(
    senders: Sequence[Layout], receivers: Sequence[Layout], specs: Sequence[TensorSpec], bucket: int
) -> tuple[ShardPart, ...]:
    plan = make_plan(senders, receivers)
    tensors = model(specs)
    for layout, got in zip(receivers, carried(plan, senders, receivers, tensors, bucket), strict=True):
        wanted = local(layout, tensors)
        assert got.keys() == wanted.keys()
        for name, array in wanted.items():
            assert got[name].shape == array.shape
            assert got[name].tobytes() == array.tobytes(), name
    return plan


@pytest.mark.nightly
@examples(RANDOM_SHARDINGS)
@given(st.integers(0, 2**32))
def test_every_receiver_gets_its_bytes_once_whatever_the_shardings(seed: int) -> None:
    rng = random.Random(seed)
    specs, trainers, wanted = random_sharding(rng)
    engines = rng.randint(1, 3)  # copies of the same sharding
    plan = check(trainers, wanted * engines, specs, rng.choice([16, 64, 1 << 20]))
    event(f"{len(trainers)} senders")
    for part in plan:
        assert len(part.receivers) % engines == 0, "equal receivers share their parts"


LLAMA = [
    TensorSpec("q", "bfloat16", (64, 32)),
    TensorSpec("k", "bfloat16", (16, 32)),
    TensorSpec("v", "bfloat16", (16, 32)),
    TensorSpec("o", "bfloat16", (32, 64)),
    TensorSpec("gate", "bfloat16", (88, 32)),
    TensorSpec("up", "bfloat16", (88, 32)),
    TensorSpec("down", "bfloat16", (32, 88)),
    TensorSpec("norm", "float32", (32,)),
]


def engine(rank: int, world: int) -> Layout:
    """A layer of a model with 8 heads and 2 key and value heads, as inference engines lay it out."""
    q, k, v, o, gate, up, down, norm = LLAMA
    return Layout.of(
        [
            shards.qkv("qkv", q, k, v, heads=8, kv_heads=2, rank=rank, world=world),
            shards.columns(o, rank, world),
            shards.gate_up("gate_up", gate, up, rank, world),
            shards.columns(down, rank, world),
            shards.whole(norm),
        ]
    )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_rows_of_fsdp_become_the_tensors_of_a_tensor_parallel_engine(world: int) -> None:
    senders = [Layout.of(shards.rows(spec, rank, 3) for spec in LLAMA) for rank in range(3)]
    plan = check(senders, [engine(rank, world) for rank in range(world)] * 2, LLAMA, 1000)
    everywhere = [part for part in plan if len(part.receivers) == 2 * world]
    assert "norm" in [tensor.name for part in everywhere for tensor in part.tensors], "what all want is one part"


def test_query_heads_of_a_rank_stand_before_its_keys_and_values_and_few_keys_are_repeated() -> None:
    q, k, v, *_ = LLAMA
    of_two = [shards.qkv("qkv", q, k, v, heads=8, kv_heads=2, rank=rank, world=4) for rank in range(4)]
    assert [tensor.shape for tensor in of_two] == [(32, 32)] * 4
    assert [(piece.tensor, piece.start[0], piece.size[0], piece.at[0]) for piece in of_two[1].pieces] == [
        ("q", 16, 16, 0),
        ("k", 0, 8, 16),  # ranks 0 and 1 have the first key head
        ("v", 0, 8, 24),
    ]
    by_group = shards.qkv("qkv", q, k, v, heads=8, kv_heads=2, by_group=True)
    assert [piece.tensor for piece in by_group.pieces] == ["q", "k", "v"] * 2


def test_a_fused_tensor_of_the_trainer_is_taken_apart() -> None:
    q, k, v, *_ = LLAMA
    megatron = [
        Layout.of([shards.qkv("qkv", q, k, v, heads=8, kv_heads=2, rank=rank, world=2, by_group=True)])
        for rank in range(2)
    ]
    check(megatron, [Layout.of([shards.whole(each) for each in (q, k, v)])], LLAMA, 256)
    served = [Layout.of([shards.qkv("qkv", q, k, v, heads=8, kv_heads=2, rank=rank, world=4)]) for rank in range(4)]
    check(megatron, served, LLAMA, 256)


def test_experts_of_their_own_names_become_a_stack_and_stages_lack_what_others_have() -> None:
    specs = [TensorSpec(f"layer.{layer}.expert.{each}", "float32", (4, 6)) for layer in range(2) for each in range(4)]
    stages = [Layout.of(shards.whole(spec) for spec in specs[:4]), Layout.of(shards.whole(spec) for spec in specs[4:])]
    receivers = [
        Layout.of(
            shards.stacked(
                f"layer.{layer}.w", [shards.whole(specs[4 * layer + each]) for each in (2 * rank, 2 * rank + 1)]
            )
            for layer in range(2)
        )
        for rank in range(2)
    ]
    check(stages, receivers, specs, 1 << 20)


def test_what_many_senders_have_is_divided_among_them() -> None:
    specs = [
        TensorSpec("embed", "bfloat16", (16384, 4096)),
        *(TensorSpec(f"t{n}", "float32", (1024,)) for n in range(8)),
    ]
    senders = [Layout.of(shards.whole(spec) for spec in specs) for _ in range(4)]
    plan = make_plan(senders, [Layout.of(shards.whole(spec) for spec in specs)])
    sent = [sum(stream.nbytes for part in plan for stream in part.streams if stream.sender == at) for at in range(4)]
    assert sum(sent) == senders[0].nbytes
    assert max(sent) <= 1.01 * min(sent)


def test_neighbouring_slices_are_one() -> None:
    spec = TensorSpec("w", "uint8", (12, 4))
    thirds = Layout.of([LocalTensor("w", "uint8", (12, 4), tuple(
        Piece("w", (12, 4), (at, 0), (4, 4), (at, 0)) for at in (0, 4, 8)
    ))])  # fmt: skip
    plan = make_plan([thirds], [Layout.of([shards.whole(spec)])])
    assert [len(stream.slices) for part in plan for stream in part.streams] == [1]


@pytest.mark.parametrize(
    ("senders", "text"),
    [
        ([], "w: gap: no sender has any of this tensor"),
        ([(0, 4), (6, 2)], r"w: gap: no sender has \[4:6, 0:3\]"),
    ],
)
def test_what_no_sender_has_is_named(senders: list[tuple[int, int]], text: str) -> None:
    spec = TensorSpec("w", "float32", (8, 3))
    layouts = [Layout.of([shards.box(spec, Box((at, 0), (size, 3)))]) for at, size in senders]
    with pytest.raises(SchemaError, match=text):
        make_plan([*layouts, Layout.of([])], [Layout.of([shards.whole(spec)])])


def test_a_gap_or_an_overlap_inside_a_local_tensor_is_named() -> None:
    def of(*places: tuple[int, int]) -> LocalTensor:
        return LocalTensor(
            "fused", "float32", (8, 3), tuple(Piece("w", (8, 3), (at, 0), (size, 3), (at, 0)) for at, size in places)
        )

    Layout.of([of((0, 5), (5, 3))])
    with pytest.raises(SchemaError, match=r"fused: gap: no piece fills \[5:6, 0:3\]"):
        Layout.of([of((0, 5), (6, 2))])
    with pytest.raises(SchemaError, match=r"fused: overlap: two pieces fill \[4:5, 0:3\]"):
        Layout.of([of((0, 5), (4, 3))])
    with pytest.raises(SchemaError, match="fused: two local tensors"):
        Layout.of([of((0, 8)), of((0, 8))])
    with pytest.raises(SchemaError, match="not inside w"):
        Layout.of([of((0, 9))])


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    one = Layout.of([shards.whole(TensorSpec("w", "float32", (4,)))])
    other = Layout.of([shards.whole(TensorSpec("w", "bfloat16", (4,)))])
    with pytest.raises(SchemaError, match=r"w: sender 1 has it as bfloat16 \(4,\), another one as float32"):
        make_plan([one, other], [one])
    with pytest.raises(SchemaError, match="w: a receiver has it as bfloat16"):
        make_plan([one], [other])


def test_shards_that_do_not_divide_are_refused() -> None:
    q, k, v, *_ = LLAMA
    with pytest.raises(UsageError, match="does not divide by 3"):
        shards.columns(q, 0, 3)
    with pytest.raises(UsageError, match="give a rank from 0 to 1"):
        shards.rows(q, 2, 2)
    with pytest.raises(UsageError, match="do not divide over 3 ranks"):
        shards.qkv("qkv", q, k, v, heads=8, kv_heads=2, rank=0, world=3)
    with pytest.raises(SchemaError, match="cannot stand behind"):
        shards.fused("f", [shards.whole(q), shards.columns(q, 0, 2)])
    with pytest.raises(SchemaError, match="does not fit 1 dimensions"):
        Layout.of([LocalTensor("w", "float32", (4,), (Piece("w", (2, 2), (0, 0), (2, 2), (0,)),))])


def test_a_layout_survives_its_packing_and_one_that_does_not_add_up_is_refused() -> None:
    layout = engine(1, 2)
    found = unpack(pack(layout), Layout)
    assert found == layout != engine(0, 2)
    with pytest.raises(ProtocolError, match="two local tensors have this name"):
        unpack(pack([[*layout.tensors, layout.tensors[0]]]), Layout)


@examples(40)
@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 6), st.integers(0, 5))] * 2), max_size=12), st.integers(0, 6))
def test_a_search_finds_what_overlaps_and_what_is_left_over_is_the_rest(pairs: list[Any], at: int) -> None:
    boxes = [Box(tuple(a for a, _ in pair), tuple(b for _, b in pair)) for pair in pairs]
    asked = Box((at, 1), (3, 4))
    index = BoxIndex(boxes)
    wanted = sorted(n for n, box in enumerate(boxes) if box.intersection(asked) is not None)
    assert sorted(number for number, _ in index.overlapping(asked)) == wanted
    grid = np.zeros((12, 12), int)
    for box in boxes:
        grid[box.start[0] : box.start[0] + box.size[0], box.start[1] : box.start[1] + box.size[1]] += 1
    assert not index.disjoint or grid.max(initial=0) <= 1
    inside = grid[at : at + 3, 1:5]
    assert sum(box.volume for box in left_over(asked, boxes)) == int((inside == 0).sum())


def described(rank: int, layout: Layout, host: str, **further: Any) -> ShardDescription:
    return ShardDescription(
        name=f"{host} {rank}",
        host=host,
        address="127.0.0.1",
        port=1,
        token="t",
        layout=pack(layout),
        bucket_bytes=further.pop("bucket_bytes", 4096),
        **further,
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_relay_stands_before_its_children_so_that_no_two_wait_for_each_other(shape: Any, in_place: bool) -> None:
    rng = random.Random(0)
    hosts = [rng.choice("abcde") for _ in range(24)]
    senders = [described(rank, Layout.of(shards.whole(spec) for spec in LLAMA), "t", shape=shape) for rank in range(2)]
    receivers = [described(at, engine(at % 4, 4), host, in_place=in_place) for at, host in enumerate(hosts)]
    sent, received = roles(senders, receivers, 7)
    first = {host: hosts.index(host) for host in hosts}
    order = {each.name: (first[each.host], at) for at, each in enumerate(receivers)}
    for receiver, role in zip(receivers, received, strict=True):
        assert {peer.name for peer in role.peers} == {
            name
            for each in role.incoming
            for name in [*(source.parent for source in each.sources), *([each.mapped[0]] if each.mapped else [])]
        }
        for each in role.incoming:
            for child in (*each.wired, *each.local):
                assert order[receiver.name] < order[child]
            assert not (in_place and each.local)
            for child in each.local:
                assert child.startswith(receiver.host)
    for part in {each.part for role in received for each in role.incoming}:
        over_wires = [
            (receiver.host, each.sources[0].parent)
            for receiver, role in zip(receivers, received, strict=True)
            for each in role.incoming
            if each.part == part and each.mapped is None
        ]
        from_elsewhere = [host for host, parent in over_wires if not parent.startswith(host)]
        assert len(from_elsewhere) == len(set(from_elsewhere)), "a part comes to a host once"
    assert {child for role in sent for child in role.children} <= order.keys()


def test_a_part_of_few_bytes_goes_by_few_hops_where_a_large_one_goes_by_a_chain() -> None:
    norm, up = LLAMA[7], LLAMA[5]

    def depth(spec: TensorSpec) -> int:
        layout = Layout.of([shards.whole(spec)])
        _, received = roles(
            [described(0, layout, "t", shape="chain", bucket_bytes=256)],
            [described(at, layout, f"h{at}", bucket_bytes=256) for at in range(16)],
            7,
        )
        parents = {f"h{at} {at}": role.incoming[0].sources[0].parent for at, role in enumerate(received)}

        def of(name: str) -> int:
            return 1 + of(parents[name]) if name in parents else 0

        return max(map(of, parents))

    assert depth(up) == 16
    assert depth(norm) == 3


@pytest.mark.parametrize(
    ("hosts", "room", "bucket"),
    [
        (4, 32 << 20, 2 << 20),  # 64 buckets for each hop
        (1, 32 << 20, 8 << 20),  # no relays
        (64, 32 << 20, 256 << 10),  # a bucket below that costs more than its bytes
        (4, 1 << 20, 1 << 20),  # what ranks have room for
    ],
)
def test_buckets_are_small_enough_that_a_chain_is_soon_filled(hosts: int, room: int, bucket: int) -> None:
    layout = Layout.of([shards.whole(spec) for spec in (TensorSpec("w", "uint8", (512 << 20,)),)])
    sent, received = roles(
        [described(0, layout, "t", shape="chain", bucket_bytes=room)],
        [described(at, layout, f"h{at}", bucket_bytes=room) for at in range(hosts)],
        7,
    )
    assert {role.bucket_bytes for role in (*sent, *received)} == {bucket}


def test_a_role_survives_its_packing_and_garbage_is_refused() -> None:
    layout = Layout.of([shards.whole(LLAMA[0])])
    sent, received = roles([described(0, layout, "t")], [described(0, layout, "a")], 7)
    for role in (*sent, *received):
        assert unpack(pack(role), RankRole) == role
    for garbage in ("", "?", pack(["x", 2]), pack(sent[0])[:-8], "AAAA"):
        with pytest.raises(ProtocolError, match="not a RankRole"):
            unpack(garbage, RankRole)
    with pytest.raises(UsageError, match="with different names"):
        roles([described(0, layout, "a")], [described(0, layout, "a")], 7)
