"""The way from a run's rings to a trainer's batches: `Trainer`, and the `Batch` that it takes."""
