"""Tickets in a torch training loop: a dataset, its loader, and batches of nested values; TensorDicts as payloads."""

from transport.adapters.torch.collating import collate
from transport.adapters.torch.dataset import Sample, TicketDataset, TicketLoader

__all__ = ["Sample", "TicketDataset", "TicketLoader", "collate"]
