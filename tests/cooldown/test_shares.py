"""Shares of a collective save, as every party computes them: each file once, and a set is complete or none at all."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.election import checkpointers
from transport.cooldown.epochs.manifest import File
from transport.cooldown.epochs.records import EpochRecord, Phase
from transport.cooldown.epochs.shares import (
    NameConflict,
    SavedShare,
    Share,
    complete,
    composed,
    divided,
    set_name,
    shares_of,
    turns,
)
from transport.errors import CheckpointDamagedError

DIGEST = "0" * 64
Epoch = tuple[EpochRecord, dict[str, SavedShare]]


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    """Members on hosts, with files of any sizes; some names are common to several members."""
    count = draw(st.integers(1, 12))
    hosts = {f"m{number}": f"h{draw(st.integers(0, 3))}" for number in range(count)}
    record = EpochRecord(
        run="run", epoch=7, destination="", cooldown_s=1.0, seed=draw(st.integers(0, 9)), phase=Phase.COOLDOWN,
        clients=tuple(sorted(hosts)), hosts=hosts,
    )  # fmt: skip
    saved = {}
    for member, host in hosts.items():
        own = draw(st.lists(st.integers(0, 1000), max_size=5))
        files = {f"{member}-{number}": size for number, size in enumerate(own)}
        if draw(st.booleans()):
            files["common"] = 7
        saved[member] = SavedShare(member=member, host=host, folder=f"/{member}", files=tuple(files.items()))
    return record, saved


def all_shares(record: EpochRecord, saved: dict[str, SavedShare]) -> list[Share]:
    """Uploaded by those whose turn it is first."""
    found = []
    for host in sorted(set(record.hosts.values())):
        parts = divided([each for each in saved.values() if each.host == host], shares_of(record, host))
        for number, part in enumerate(parts):
            files = tuple(File(name=file.name, size=file.size, blocks=(DIGEST,)) for file in part)
            client = turns(record, host, number)[0]
            found.append(Share(host=host, number=number, client=client, attempt=f"{number:016x}", files=files))
    return found


@given(epochs(), st.randoms())
def test_every_file_is_in_one_share_of_its_host(epoch: Epoch, order: random.Random) -> None:
    record, saved = epoch
    for host in set(record.hosts.values()):
        members = [each for each in saved.values() if each.host == host]
        parts = divided(members, shares_of(record, host))
        assert len(parts) == checkpointers(len(members))
        names = [file.name for part in parts for file in part]
        assert len(names) == len(set(names))
        assert set(names) == {name for each in members for name, _ in each.files}
        assert {(file.name, folder) for part in parts for file in part for folder in file.folders} == {
            (name, each.folder) for each in members for name, _ in each.files
        }
        order.shuffle(members)
        assert divided(members, shares_of(record, host)) == parts


@given(epochs())
def test_every_member_of_a_host_has_its_turn(epoch: Epoch) -> None:
    record, _ = epoch
    for host in set(record.hosts.values()):
        elected = record.elected_of(host)
        for number in range(shares_of(record, host)):
            order = turns(record, host, number)
            assert order[0] == elected[number]
            assert sorted(order) == list(record.members_of(host))


@given(epochs(), st.data())
def test_a_set_is_complete_with_every_share_and_not_without_one(epoch: Epoch, data: st.DataObject) -> None:
    record, saved = epoch
    shares = all_shares(record, saved)
    found = complete(record, data.draw(st.permutations(shares)))
    assert found is not None
    assert sorted(found, key=lambda share: (share.host, share.number)) == found
    lost = data.draw(st.sampled_from(shares))
    assert complete(record, [share for share in shares if share is not lost]) is None
    refused = msgspec.structs.replace(record, refused={lost.upload: "wrong_size"})
    assert complete(refused, shares) is None
    again = Share(host=lost.host, number=lost.number, client=lost.client, attempt="f" * 16, files=lost.files)
    second = complete(refused, [*shares, again])
    assert second is not None
    assert set_name(second) != set_name(found)


@given(epochs())
def test_the_manifest_names_every_file_once_and_where_it_is(epoch: Epoch) -> None:
    record, saved = epoch
    names = {name for each in saved.values() for name, _ in each.files}
    shares = all_shares(record, saved)
    manifest = composed(record, shares, saved)
    assert [file.name for file in manifest.files] == sorted(names)
    assert {file.upload for file in manifest.files} <= {share.upload for share in shares}
    if names:
        assert manifests.decode(manifest.encode()) == manifest
    unsaved = dict(list(saved.items())[1:])
    with pytest.raises(NameConflict, match="members missing"):
        composed(record, shares, unsaved)


def test_a_share_without_one_of_the_files_is_no_part_of_a_set() -> None:
    record = EpochRecord(run="run", epoch=7, destination="", cooldown_s=1.0, seed=1, hosts={"a": "h"}, clients=("a",))
    saved = {"a": SavedShare(member="a", host="h", folder="/a", files=(("1", 1), ("2", 2)))}
    share = Share(
        host="h", number=0, client="a", attempt="0" * 16, files=(File(name="1", size=1, blocks=(DIGEST,)),)
    )  # fmt: skip
    with pytest.raises(NameConflict, match="not what the members saved"):
        composed(record, [share], saved)


@pytest.mark.parametrize(
    "change",
    ['"upload":"a/../b"', '"upload":"../x/0000000000000000"', '"upload":"a"', '"name":"1/2"'],
)
def test_a_manifest_cannot_point_elsewhere(change: str) -> None:
    files = (
        File(name="1", size=1, blocks=(DIGEST,), upload="a/" + "0" * 16),
        File(name="2", size=1, blocks=(DIGEST,), upload="a/" + "0" * 16),
    )
    manifest = manifests.CheckpointManifest(run="run", epoch=7, step=1, client="sharded", attempt="0" * 16, files=files)
    data = manifest.encode()
    assert manifests.decode(data) == manifest
    key = change.partition(":")[0]
    old = {'"upload"': f'"upload":"a/{"0" * 16}"', '"name"': '"name":"2"'}[key]
    with pytest.raises(CheckpointDamagedError):
        manifests.decode(data.replace(old.encode(), change.encode()))
