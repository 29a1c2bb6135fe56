"""The common part of the adapters of checkpoint engines (verl, NeMo-RL)."""
