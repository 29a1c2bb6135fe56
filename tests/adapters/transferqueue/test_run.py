"""The backend within the whole of TransferQueue: Ray, its controller, and clients in several processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import eventually

from transport.ring.attachment import remove_dead

pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install TransferQueue")

pytestmark = [pytest.mark.slow, pytest.mark.ucx, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"
SOURCES = Path(os.environ.get("TRANSFERQUEUE_SOURCES", ROOT / "build" / "TransferQueue"))
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}  # a Ray of their own


# They look at the files of SimpleStorage itself.
OF_SIMPLE_STORAGE = (
    "test_tensor_fields",
    "test_storage_saved_is_true",
    "test_load_raises_on_storage_unit_count_mismatch",
)


def test_batches_go_from_process_to_process_and_only_the_first_imports_the_backend() -> None:
    script = SUPPORT / "transferqueue_run.py"
    done = subprocess.run([sys.executable, str(script)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sums"] == [[120.0, 16.0, "aabb"], [120.0, 16.0, "aabb"]]
    assert found["put elsewhere"] == 4 * 8
    assert found["after clear"].startswith("ValueError")
    assert found["in use"] == 0
    assert found["put again"] == 1
    assert found["putter killed"] == 4 * 8  # its listeners outlive it
    assert found["in use at the end"] == 0


@pytest.mark.skipif(
    not SOURCES.joinpath("tests", "e2e").is_dir(),
    reason="TransferQueue's own tests are not here: make transferqueue-sources, or TRANSFERQUEUE_SOURCES=(a checkout)",
)
@pytest.mark.parametrize(
    "name", ["test_e2e_lifecycle_consistency.py", "test_kv_interface_e2e.py", "test_checkpoint_e2e.py"]
)
def test_transferqueues_own_tests_of_backends_pass(name: str) -> None:
    """Those that it runs over each of its backends, by TQ_TEST_BACKEND, and those of checkpoints."""
    environment = {**ENVIRONMENT, "TQ_TEST_BACKEND": "PayloadTransport", "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "transferqueue_upstream"]
    command += ["-c", os.devnull, "--rootdir", str(SOURCES), str(SOURCES / "tests" / "e2e" / name)]
    command += ["-k", " and ".join(f"not {each}" for each in OF_SIMPLE_STORAGE)]
    done = subprocess.run(command, env=environment, cwd=SOURCES, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


def alive_with(mark: str) -> list[int]:
    """Processes whose environment has this mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"JOB={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


@pytest.mark.nightly
def test_a_job_that_was_killed_whole_has_its_values_again(tmp_path: Path) -> None:
    folder, mark = tmp_path / "step-7", secrets.token_hex(8)
    found = []
    for what in ("save", "load"):
        command = [sys.executable, str(SUPPORT / "transferqueue_checkpoint.py"), what, str(folder)]
        # into files: Ray's processes outlive the driver that was killed, and would keep a pipe open
        with (tmp_path / "out").open("w+") as out, (tmp_path / "errors").open("w+") as errors:
            done = subprocess.run(command, env={**ENVIRONMENT, "JOB": mark}, stdout=out, stderr=errors, timeout=300)
            while left := alive_with(mark):
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            out.seek(0)
            errors.seek(0)
            assert done.returncode == (-signal.SIGKILL if what == "save" else 0), errors.read()[-4000:]
            found.append(json.loads(out.read().splitlines()[-1]))
        eventually(lambda: remove_dead("tq-"), "the end of its processes")
        assert json.loads((folder / "metadata.json").read_text())["storage_saved"]
    assert found[0] == found[1]
    assert found[1]["elsewhere"] == 20 * 8 and len(found[1]["keys"]) == 15 and found[1]["text"] == "fghijklmnopqrst"
