"""GRPO with two data-parallel ranks: a small transformer learns to add, from the answers that rollouts sample of it.

pip install torch; python examples/grpo.py [FOLDER]   (a minute; with the FOLDER of a run that was killed it goes on)
Rollouts write groups of 8 answers to a question. The ranks, started by torchrun, train on the same steps of whole
groups, and offer their weights to the rollouts. Kill any of them, or all: no group is in the weights twice."""

import os
import random
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from transport import BlockingClient, Mesh, Rollout, Schema, Trainer, UpTo, open_rings
from transport.runtime.signals import until_stopped
from transport.weights import Offers, ReferenceWorker, Taker

TEXT, ASKED, MOST = "0123456789+=.", 4, 3  # "3+5=" is answered by "8."; a longer answer is cut
SAMPLES, GROUPS, STEPS = 8, 8, 100
SCHEMA = Schema.of(tokens=("int64", UpTo(ASKED + MOST)), logprobs=("float32", UpTo(MOST)), reward="float32")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(TEXT), 64), nn.Embedding(ASKED + MOST, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, len(TEXT))

    def forward(self, tokens):  # log-probabilities of each next token
        seen = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        found = self.layers(self.token(tokens) + self.place.weight[: tokens.shape[1]], seen, is_causal=True)
        return torch.log_softmax(self.out(found), -1)

    def of_answers(self, tokens):  # log-probabilities of the tokens behind the question
        return self(tokens)[:, ASKED - 1 : -1].gather(2, tokens[:, ASKED:, None])[..., 0]

    def learn_base(self):  # from all sums, of which half are wrong
        optimizer, pairs = torch.optim.Adam(self.parameters(), 3e-3), [(a, b) for a in range(10) for b in range(10)]
        for _ in range(250):
            texts = [f"{a}+{b}={random.choice((a + b, random.randrange(19)))}...."[: ASKED + MOST] for a, b in pairs]
            optimizer.zero_grad()
            (-self.of_answers(torch.tensor([[TEXT.index(each) for each in text] for text in texts])).mean()).backward()
            optimizer.step()

    def loss(self, micro, advantage):
        batch, lengths = micro.torch(), torch.from_numpy(micro.lengths["logprobs"])
        ratio = (self.of_answers(batch["tokens"]) - batch["logprobs"]).exp()
        gain = torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
        return -(gain * (torch.arange(gain.shape[1]) < lengths[:, None])).sum(1).div(lengths).sum()


WEIGHTS = Schema.of(**{name: ("float32", *each.shape) for name, each in Model().state_dict().items()})


def rollout(folder: Path, name: str) -> None:
    model, count, taker = Model(), 0, Taker(worker := ReferenceWorker("own"))
    with (
        until_stopped() as stopped,
        open_rings(f"rings:{folder.name}-") as run,
        BlockingClient(schemas=[WEIGHTS]) as client,
        Rollout(SCHEMA, run, name=name, slots=10 * SAMPLES, mode="thread", drain_s=0) as writer,
    ):
        while not stopped.is_set():
            if taker.follow(run, client, topic=name, wait_s=0.0 if count else 0.5):
                model.load_state_dict({name: torch.tensor(each) for name, each in worker.weights.items()})
            if taker.version < 0:
                continue
            a, b, group, count = random.randrange(10), random.randrange(10), f"{name}-{os.getpid()}-{count}", count + 1
            tokens = torch.tensor([[TEXT.index(each) for each in f"{a}+{b}="]] * SAMPLES)
            with torch.no_grad():
                for _ in range(MOST):
                    tokens = torch.cat([tokens, torch.multinomial(model(tokens)[:, -1].exp(), 1)], 1)
                logprobs = model.of_answers(tokens).numpy()
            for row, old in zip(tokens.tolist(), logprobs, strict=True):
                said, point, _ = "".join(TEXT[each] for each in row[ASKED:]).partition(".")
                end = len(said + point)
                sample = {"tokens": row[: ASKED + end], "logprobs": old[:end], "reward": said + point == f"{a + b}."}
                writer.write(sample, version=taker.version, group=group, of=SAMPLES, tokens=ASKED + end)


def advantages(step):  # of each micro-batch: rewards less their group's mean, over its deviation
    rewards, groups = map(np.concatenate, zip(*((micro["reward"], micro.groups) for micro in step), strict=True))
    for mine in [groups == group for group in set(groups.tolist())]:
        rewards[mine] = (rewards[mine] - rewards[mine].mean()) / (rewards[mine].std() + 1e-4)
    return torch.from_numpy(rewards).split([len(micro) for micro in step])


def train(folder: Path, _: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh, checkpoint = Mesh.of_torchrun(store=f"sqlite:///{folder}/steps.db"), folder / "checkpoint.pt"
    record, history, optimizer = None, [], torch.optim.Adam((model := Model()).parameters(), 1e-3)
    if checkpoint.exists():
        weights, moments, record, history = torch.load(checkpoint)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    elif mesh.rank == 0:
        model.learn_base()
    for each in model.parameters():
        dist.broadcast(each.data, 0)
    with (
        Trainer(SCHEMA, f"rings:{folder.name}-", mesh=mesh, record=record, max_age=6) as trainer,
        Offers(WEIGHTS, trainer.rings, topic=f"rollout-{mesh.rank}") as offers,  # each rank has a rollout to serve
    ):
        trainer.version, steps = len(history), iter(trainer.steps(GROUPS, max_tokens=128, group_timeout_s=30))
        while trainer.version < STEPS:
            offers.publish({name: each.numpy() for name, each in model.state_dict().items()}, trainer.version)
            step, reward = next(steps), torch.zeros(1)
            optimizer.zero_grad(set_to_none=False)
            for micro, advantage in zip(step, advantages(step), strict=True):
                if len(micro):  # a replica with fewer samples than micro-batches has empty ones
                    (model.loss(micro, advantage) / step.samples).backward()
                    reward += float(micro["reward"].sum()) / step.samples
            for each in [reward, *(each.grad for each in model.parameters())]:
                dist.all_reduce(each)
            optimizer.step()
            step.accept()
            history, trainer.version = [*history, (reward.item(), step.groups)], len(history) + 1
            print(f"rank {mesh.rank}, step {len(history)}: mean reward {reward.item():.2f}", flush=True)
            if mesh.rank == 0:
                state = (model.state_dict(), optimizer.state_dict(), trainer.record.to_bytes(), history)
                torch.save(state, f"{checkpoint}.new")
                Path(f"{checkpoint}.new").replace(checkpoint)
            dist.barrier()  # the checkpoint has the step
            trainer.consume()


def main(folder: Path, _: str) -> None:
    rollouts = [subprocess.Popen([sys.executable, __file__, str(folder), f"rollout-{rank}"]) for rank in (0, 1)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    try:  # a rank that is killed takes the others with it, and all go on from the checkpoint
        while subprocess.call([*torchrun, __file__, str(folder), "train"]):
            print("the ranks start again", flush=True)
    finally:
        for each in rollouts:
            each.terminate()
            each.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="grpo-") as new:
        folder, role = [*sys.argv[1:], *[new, ""][len(sys.argv) - 1 :]]
        {"train": train, "": main}.get(role, rollout)(Path(folder).resolve(), role)
