"""Weights back to the rollouts: all of a version or none of it. docs/WEIGHTS.md is what users read."""
