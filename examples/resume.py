"""A job that is killed as a whole goes on: every prompt is in its weights once. The recipe of docs/RESTART.md.

.venv/bin/python examples/resume.py [FOLDER]      (with the FOLDER of a job that was killed it goes on)

The trainer takes a snapshot of the rings with each checkpoint. A launcher starts the job from the newest checkpoint
whose snapshot is complete: it restores the payloads into a ring of its own, and then starts rollouts and trainer. From
their directory the trainer learns of a rollout that has ended before it looks.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from transport import Rollout, Schema, ServerOptions, Trainer
from transport.packer.consumed_record import ConsumedRecord
from transport.snapshots import Saved, prune, snapshot, steps

SCHEMA = Schema.of(reward="float32")
PROMPTS, ROLLOUTS, BATCH, EVERY = 400, 2, 8, 5
AT_ONCE = ServerOptions(linger_s=0)  # what a killed rollout has left comes from the snapshot


def rollout(folder: Path, rings: str, number: str) -> None:
    """Write an answer to each prompt of this rollout's share that the restored job does not have yet."""
    known = set(json.loads((folder / "known.json").read_text()))
    with Rollout(SCHEMA, rings, slots=16, server=AT_ONCE) as writer:
        for prompt in range(int(number), PROMPTS, ROLLOUTS):
            if prompt not in known:
                writer.write({"reward": float(prompt)}, metadata={"prompt": prompt})


def train(folder: Path, rings: str, start: str) -> None:
    """Learn from all payloads, with a checkpoint and a snapshot every few batches."""
    step, expected = map(int, start.split())
    state = checkpoint(folder, step)
    upload = None
    with Trainer(SCHEMA, rings, record=bytes.fromhex(state["record"]), expected_rollouts=expected) as trainer:
        for batch in trainer.batches(BATCH):
            state["weights"] += float(batch["reward"].sum())
            state["learned"] += [payload.metadata["prompt"] for payload in batch]
            batch.consume()
            step += 1
            print(f"step {step}", flush=True)
            if step % EVERY == 0:
                if upload is not None:
                    upload.wait()  # the one before is complete
                    prune(f"{folder}/snapshots", keep=2)
                state["record"] = trainer.record.to_bytes().hex()  # from here until `snapshot` returns: no consume
                upload = snapshot(trainer.rings, f"{folder}/snapshots", step)
                save(folder, step, {**state, "attempt": upload.attempt})
        if upload is not None:
            upload.wait()
    (folder / "result.json").write_text(json.dumps(state))


def checkpoint(folder: Path, step: int) -> dict:
    """Return the state after a step; step 0 is the beginning."""
    if step:
        return json.loads((folder / f"checkpoint-{step}.json").read_text())
    return {"weights": 0.0, "learned": [], "record": ConsumedRecord().to_bytes().hex(), "attempt": ""}


def save(folder: Path, step: int, state: dict) -> None:
    """Write a checkpoint whole or not at all."""
    (folder / "new").write_text(json.dumps(state))
    (folder / "new").replace(folder / f"checkpoint-{step}.json")


def launch(folder: Path) -> None:
    """Choose where the job goes on, restore the payloads of that moment, and run the job. One process does this."""
    (folder / "snapshots").mkdir(exist_ok=True)
    step, state = 0, checkpoint(folder, 0)
    for each, attempts in steps(f"{folder}/snapshots").items():
        if (folder / f"checkpoint-{each}.json").exists() and checkpoint(folder, each)["attempt"] in attempts:
            step, state = each, checkpoint(folder, each)  # the last one of them is the newest
    rings = f"rings+sqlite:{folder}/rings-{secrets.token_hex(4)}"  # a new directory for each start
    print(f"starting at step {step}", flush=True)
    saved = Saved(f"{folder}/snapshots", step, attempt=state["attempt"]) if step else None
    payloads = saved.payloads if saved else []
    known = state["learned"] + [payload.ticket.metadata["prompt"] for payload in payloads]
    (folder / "known.json").write_text(json.dumps(known))
    program = [sys.executable, __file__, str(folder)]
    expected = ROLLOUTS  # that have to end before the trainer does
    with ExitStack() as stack:
        if saved:
            stack.enter_context(saved)
        if saved and payloads:
            restored = Rollout(SCHEMA, rings, slots=len(payloads), server=AT_ONCE, drain_s=600)
            stack.enter_context(restored)
            record = ConsumedRecord.from_bytes(bytes.fromhex(state["record"]))
            saved.restore(restored, consumed=[record])
            expected += 1
        trainer = subprocess.Popen([*program, "train", rings, f"{step} {expected}"])
        rollouts = [subprocess.Popen([*program, "rollout", rings, str(number)]) for number in range(ROLLOUTS)]
    # the end of the with has waited until the trainer has consumed what was restored
    if failed := trainer.wait():  # the rollouts would wait for it
        for each in rollouts:
            each.terminate()
    assert [failed, *(each.wait() for each in rollouts)] == [0] * (1 + ROLLOUTS)


def main(folder: Path) -> None:
    """Run the job, kill all of it after some steps, and let it go on."""
    program = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        for line in job.stdout:
            if line == "step 27\n":  # more than one rollout alone has written, so that none is killed while it starts
                os.killpg(job.pid, signal.SIGKILL)
    subprocess.run(program, check=True)
    result = json.loads((folder / "result.json").read_text())
    assert sorted(result["learned"]) == list(range(PROMPTS))
    assert result["weights"] == sum(range(PROMPTS))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            with tempfile.TemporaryDirectory(prefix="resume-") as new:
                main(Path(new))
        case [folder]:
            launch(Path(folder))
        case [folder, role, rings, which]:
            {"rollout": rollout, "train": train}[role](Path(folder), rings, which)
