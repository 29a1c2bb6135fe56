"""Weights from trainers to replicas: all of a version or none of it. Users read docs/WEIGHTS.md."""
