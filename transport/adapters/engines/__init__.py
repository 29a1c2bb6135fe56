"""What the adapters of checkpoint engines (verl, NeMo-RL) share."""
