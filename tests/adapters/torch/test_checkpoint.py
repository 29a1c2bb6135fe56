"""torch.distributed.checkpoint loads an epoch's checkpoint from its destination, in proven blocks.

tests/cooldown/test_torch_checkpoint.py loads on several ranks what several ranks have saved.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from transport.adapters.torch.checkpoint import CheckpointReader  # noqa: E402
from transport.cooldown import EpochRecord, Outcome, Phase  # noqa: E402
from transport.cooldown.destinations.folder import Folder  # noqa: E402
from transport.cooldown.epochs.manifest import BLOCK  # noqa: E402
from transport.cooldown.epochs.records import Checkpoint, upload_folder  # noqa: E402
from transport.cooldown.upload import upload  # noqa: E402
from transport.errors import CheckpointDamagedError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ATTEMPT = "0123456789abcdef"
PLACE = upload_folder("run", 7, f"a/{ATTEMPT}")
LARGE = 3 * BLOCK // 4  # float32: three blocks


class Watched(Folder):
    """A folder that remembers which parts of its files were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.parts: list[tuple[str, int, int]] = []

    def part(self, path: str, start: int, size: int) -> bytes:
        self.parts.append((path.rpartition("/")[2], start, size))
        return super().part(path, start, size)


def model(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(LARGE, generator=made),
        "columns": torch.randn(64, 32, generator=made).bfloat16(),
        "steps": {"count": seed, "names": ["a", "b"]},
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in ("large", "columns")) and one["steps"] == other["steps"]


def stored(path: Path, save: Callable[[Path], object]) -> tuple[EpochRecord, Watched]:
    """What `save` wrote, uploaded as the checkpoint of epoch 7."""
    (path / "destination").mkdir()
    (path / "saved").mkdir()
    save(path / "saved")
    url = (path / "destination").as_uri()
    record = EpochRecord(run="run", epoch=7, step=30, seed=1, cooldown_s=60, destination=url)
    destination = Watched(path / "destination")
    done = upload(path / "saved", destination, record, "a", ATTEMPT)
    checkpoint = Checkpoint(
        client="a",
        attempt=ATTEMPT,
        manifest_sha256=hashlib.sha256(done.manifest.encode()).hexdigest(),
        files=len(done.manifest.files),
        bytes=done.manifest.total,
    )
    ended = {"phase": Phase.ENDED, "outcome": Outcome.CHECKPOINTED, "checkpoint": checkpoint}
    return msgspec.structs.replace(record, **ended), destination


def dcp_save(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model(1), storage_writer=dcp.FileSystemWriter(folder))


def file_of(destination: Folder, name: str) -> Path:
    return destination.root / PLACE / "files" / name


def test_a_whole_model_is_loaded_in_blocks(tmp_path: Path) -> None:
    record, destination = stored(tmp_path, dcp_save)
    state = model(2)
    dcp.load(state, storage_reader=CheckpointReader(record, destination))
    assert equal(state, model(1))
    blocks = [(start, size) for name, start, size in destination.parts if name == "__0_0.distcp"]
    assert 3 <= len(set(blocks)) >= len(blocks) - 1  # the end of the large tensor is read first, and once more
    assert not list(tmp_path.rglob("*.partial"))


def test_a_tensor_alone_takes_the_blocks_that_it_lies_in(tmp_path: Path) -> None:
    record, destination = stored(tmp_path, dcp_save)
    state = {"columns": torch.zeros(64, 32, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=CheckpointReader(record, destination))
    assert torch.equal(state["columns"], model(1)["columns"])
    read = sum(size for _, _, size in destination.parts)
    assert read <= 2 * BLOCK < file_of(destination, "__0_0.distcp").stat().st_size


def test_a_folder_of_the_checkpoint_is_loaded_by_its_name(tmp_path: Path) -> None:
    record, destination = stored(tmp_path, lambda folder: dcp_save(folder / "model"))
    for reader, options in (
        (CheckpointReader(record, destination, "model"), {}),
        (CheckpointReader(record, destination), {"checkpoint_id": "model"}),
    ):
        state = model(2)
        dcp.load(state, storage_reader=reader, **options)
        assert equal(state, model(1))


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


def flip(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(BLOCK + 5)
        byte = opened.read(1)
        opened.seek(BLOCK + 5)
        opened.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "said"), [(cut, "size mismatch"), (flip, "checksum mismatch"), (Path.unlink, "missing")]
)
def test_a_file_that_was_damaged_is_an_error_that_names_it(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    record, destination = stored(tmp_path, dcp_save)
    reader = CheckpointReader(record, destination)
    damage(file_of(destination, "__0_0.distcp"))
    with pytest.raises(CheckpointException, match=rf"CheckpointDamagedError: run run, epoch 7.*__0_0.distcp.*{said}"):
        dcp.load(model(2), storage_reader=reader)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    record, destination = stored(tmp_path, dcp_save)

    class Cutting(Watched):
        def part(self, path: str, start: int, size: int) -> bytes:
            if start:
                cut(file_of(self, "__0_0.distcp"))
            return super().part(path, start, size)

    reader = CheckpointReader(record, Cutting(destination.root))
    with pytest.raises(CheckpointException, match=r"__0_0.distcp: size mismatch"):
        dcp.load(model(2), storage_reader=reader)


def test_another_manifest_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    record, destination = stored(tmp_path, dcp_save)
    (destination.root / PLACE / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointDamagedError, match="not the one that was reported"):
        CheckpointReader(record, destination)


def test_a_checkpoint_that_torch_did_not_save_is_told(tmp_path: Path) -> None:
    record, destination = stored(tmp_path, lambda folder: (folder / "model.bin").write_bytes(bytes(100)))
    with pytest.raises(CheckpointException, match=r"not saved by torch.distributed.checkpoint.*model.bin"):
        dcp.load(model(2), storage_reader=CheckpointReader(record, destination))
