"""One script per peer, each run by the Python of its own environment: see harness.py for what they have in common."""
