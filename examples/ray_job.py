"""Rollouts and a trainer as Ray actors; payloads go from ring to trainer and never through Ray.

pip install ray; python examples/ray_job.py
"""

import numpy as np
import ray

from transport import Rollout, Schema, Trainer, UpTo
from transport.adapters.ray import open_rings, start_directory

schema = Schema.of(tokens=("int32", UpTo(4096)))


@ray.remote(num_cpus=0, max_restarts=-1)
class Player:  # one ring for each actor
    def __init__(self, run):
        self.rollout = Rollout(schema, open_rings(run), slots=64)

    def play(self, episodes):
        for episode in range(episodes):
            self.rollout.write({"tokens": np.arange(episode + 1, dtype=np.int32)}, metadata={"episode": episode})

    def close(self):
        self.rollout.close()


@ray.remote(num_cpus=0, max_restarts=-1)
class Learner:
    def __init__(self, run):
        self.trainer = Trainer(schema, open_rings(run))
        self.seen = 0

    def train(self, episodes):
        with self.trainer:
            for batch in self.trainer.batches(16, stopping=lambda: self.seen == episodes):
                batch.consume()
                self.seen += int(batch.accepted.sum())
        return self.seen


ray.init()  # or ray.init(address="auto")
directory = start_directory("job-7")  # keep the handle: the directory ends with it
players = [Player.remote("job-7") for _ in range(2)]
playing = [player.play.remote(100) for player in players]
assert ray.get(Learner.remote("job-7").train.remote(200)) == 200
ray.get([player.close.remote() for player in players])
