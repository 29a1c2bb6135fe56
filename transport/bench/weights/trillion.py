"""A plan for a model of 1 T parameters: how long computing it takes, what each link carries, how long that takes.

Nothing is sent. The plan is the real one; the seconds follow from unit costs: the rate of a link, and what hashing and
copying cost on this machine. The model has the shapes of a mixture of experts with 61 layers of 384 experts, one byte
for each parameter of a matrix. 256 trainer ranks have the dense tensors by rows, and the experts over 32 ranks in each
of 8 stages; 128 engine ranks are 4 engines of 32, each with 12 experts of every layer, and all dense tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from transport import _ring
from transport.schema import TensorSpec
from transport.weights.sharding import shards
from transport.weights.sharding.layouts import Layout, LocalTensor
from transport.weights.sharding.plan import ShardPlan, make_plan

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 7168, 2048, 384, 61, 163840
SENDERS, STAGES, ENGINES, ENGINE_RANKS, HOST_RANKS = 256, 8, 4, 32, 8
_BYTE = "float8_e4m3fn"
_SAMPLE_BYTES = 64 << 20


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan says. Seconds and bytes.

    Attributes:
        check_s, plan_s: processor seconds to check all layouts (each rank checks its own), and to compute the plan.
        sender_bytes, receiver_bytes: of the busiest link, out and in; relayed_bytes: out of the busiest receiver.
        hash_rate, copy_rate: bytes per second of one core here; place_rate: into its place, and proven there.
        parts_s: seconds of each thing that could be the bottleneck, for the busiest rank.
    """

    parameters: float
    senders: int
    receivers: int
    slices: int
    parts: int
    check_s: float
    plan_s: float
    moved_bytes: int
    sender_bytes: int
    receiver_bytes: int
    relayed_bytes: int
    link_rate: float
    hash_rate: float
    copy_rate: float
    place_rate: float
    parts_s: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """The largest of `parts_s`."""
        return max(self.parts_s, key=self.parts_s.__getitem__)


def layouts() -> tuple[list[Layout], list[Layout]]:
    """Of all senders and receivers."""
    dense = [_dense(layer) for layer in range(LAYERS)]
    experts = [[_expert(layer, each) for each in range(EXPERTS)] for layer in range(LAYERS)]
    ends = [TensorSpec(name, "bfloat16", (VOCABULARY, HIDDEN)) for name in ("embed", "head")]
    everything = [*ends, *(spec for layer in dense for spec in layer)]
    of_stage = -(-LAYERS // STAGES)
    senders = []
    for rank in range(SENDERS):
        stage, group = divmod(rank, SENDERS // STAGES)
        mine = range(group * EXPERTS * STAGES // SENDERS, (group + 1) * EXPERTS * STAGES // SENDERS)
        held = [shards.rows(spec, rank, SENDERS) for spec in everything]
        for layer in range(stage * of_stage, min(LAYERS, (stage + 1) * of_stage)):
            held += [shards.whole(spec) for each in mine for spec in experts[layer][each]]
        senders.append(Layout(tuple(held)))
    receivers = []
    for rank in range(ENGINE_RANKS):
        wanted = [shards.even(spec, 0, rank, ENGINE_RANKS) for spec in ends]
        wanted += [shards.whole(spec) for layer in dense for spec in layer]
        mine = range(rank * EXPERTS // ENGINE_RANKS, (rank + 1) * EXPERTS // ENGINE_RANKS)
        for layer in range(LAYERS):
            wanted += _fused(layer, [experts[layer][each] for each in mine])
        receivers.append(Layout(tuple(wanted)))
    return senders, receivers * ENGINES


def _dense(layer: int) -> list[TensorSpec]:
    shapes = {
        "q_a": (1536, HIDDEN),
        "q_b": (64 * 192, 1536),
        "kv_a": (576, HIDDEN),
        "kv_b": (64 * 256, 512),
        "o": (HIDDEN, 64 * 128),
        "shared.gate": (INNER, HIDDEN),
        "shared.up": (INNER, HIDDEN),
        "shared.down": (HIDDEN, INNER),
    }
    found = [TensorSpec(f"layers.{layer}.{name}", _BYTE, shape) for name, shape in shapes.items()]
    narrow = {"norm.in": (HIDDEN,), "norm.mlp": (HIDDEN,), "router": (EXPERTS, HIDDEN)}
    return found + [TensorSpec(f"layers.{layer}.{name}", "bfloat16", shape) for name, shape in narrow.items()]


def _expert(layer: int, number: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    name = f"layers.{layer}.experts.{number}"
    return (
        TensorSpec(f"{name}.gate", _BYTE, (INNER, HIDDEN)),
        TensorSpec(f"{name}.up", _BYTE, (INNER, HIDDEN)),
        TensorSpec(f"{name}.down", _BYTE, (HIDDEN, INNER)),
    )


def _fused(layer: int, experts: list[tuple[TensorSpec, TensorSpec, TensorSpec]]) -> list[LocalTensor]:
    first = [shards.fused("w13", [shards.whole(gate), shards.whole(up)]) for gate, up, _ in experts]
    second = [shards.whole(down) for _, _, down in experts]
    return [shards.stacked(f"layers.{layer}.w13", first), shards.stacked(f"layers.{layer}.w2", second)]


def estimate(link_rate: float) -> Estimate:
    """Compute the plan, and the seconds for links of so many bytes per second."""
    senders, receivers = layouts()
    begun = time.process_time()
    for layout in (*senders, *receivers[:ENGINE_RANKS]):
        layout.check()
    checked = time.process_time()
    plan = make_plan(senders, receivers)
    planned = time.process_time()
    hash_rate, copy_rate, place_rate = _rates()
    sent, wanted = max(plan.sent()), max(plan.wanted())
    landed, relayed = _landed(plan)
    return Estimate(
        parameters=sum(tensor.nbytes for layout in senders for tensor in layout.tensors),
        senders=len(senders),
        receivers=len(receivers),
        slices=plan.slices,
        parts=len(plan.parts),
        check_s=round(checked - begun, 2),
        plan_s=round(planned - checked, 2),
        moved_bytes=plan.nbytes,
        sender_bytes=sent,
        receiver_bytes=landed,
        relayed_bytes=relayed,
        link_rate=link_rate,
        hash_rate=round(hash_rate),
        copy_rate=round(copy_rate),
        place_rate=round(place_rate),
        parts_s={
            "sender's link": round(sent / link_rate, 3),
            "receiver's link, in": round(landed / link_rate, 3),
            "receiver's link, relaying": round(relayed / link_rate, 3),
            "sender's core: gathering and hashing": round(sent / place_rate, 3),
            # spread and prove each bucket, then hash the parts and the tensors once more; a relay copies
            "receiver's core: placing and proving": round(
                landed / place_rate + 2 * wanted / hash_rate + relayed / copy_rate, 3
            ),
        },
    )


def _landed(plan: ShardPlan) -> tuple[int, int]:
    """Bytes into and out of the busiest receiver: one of each host lands a part, a chain of hosts relays it."""
    into, out = [0] * plan.receivers, [0] * plan.receivers
    for part in plan.parts:
        hosts = sorted({receiver // HOST_RANKS for receiver in part.receivers})
        landings = [min(each for each in part.receivers if each // HOST_RANKS == host) for host in hosts]
        for at, landing in enumerate(landings):
            into[landing] += part.nbytes
            out[landing] += part.nbytes if at + 1 < len(landings) else 0
    return max(into), max(out)


def _rates() -> tuple[float, float, float]:
    source = np.full(_SAMPLE_BYTES, 7, np.uint8)
    target = np.ones(_SAMPLE_BYTES, np.uint8)

    def place() -> None:
        _ring.copy(target.data, source.data)
        _ring.checksum(target.data)

    return (
        _rate(lambda: _ring.checksum(source.data)),
        _rate(lambda: _ring.copy(target.data, source.data)),
        _rate(place),
    )


def _rate(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return _SAMPLE_BYTES / best


def text(found: Estimate) -> str:
    """The estimate in lines."""
    gb = 1e9
    lines = [
        f"{found.parameters / 1e12:.2f} TB on {found.senders} senders → {found.receivers} receivers "
        f"({ENGINES} engines of {ENGINE_RANKS}, hosts of {HOST_RANKS}); nothing was sent",
        f"plan: {found.plan_s:.1f} processor seconds, once as long as the layouts stay; {found.slices} slices in "
        f"{found.parts} parts "
        f"({found.plan_s / found.slices * 1e6:.0f} µs each); layouts checked in {found.check_s:.1f} s",
        f"bytes: {found.moved_bytes / gb:.0f} GB leave the senders; the busiest sender sends "
        f"{found.sender_bytes / gb:.2f} GB, the busiest receiver gets {found.receiver_bytes / gb:.2f} GB over its "
        f"link and relays {found.relayed_bytes / gb:.2f} GB",
        f"unit costs: links of {found.link_rate / gb:.1f} GB/s (given); measured here, one core: hash "
        f"{found.hash_rate / gb:.1f}, copy {found.copy_rate / gb:.1f}, place and prove {found.place_rate / gb:.1f} "
        "GB/s",
        *(f"  {name}: {seconds:.2f} s" for name, seconds in found.parts_s.items()),
        f"estimate: {found.parts_s[found.bottleneck]:.2f} s, and the bottleneck is the {found.bottleneck}; copies from "
        "and to devices, and queueing, are not in it",
    ]
    return "\n".join(lines)
