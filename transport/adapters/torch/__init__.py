"""Tickets in a torch training loop: a dataset and its loader."""

from transport.adapters.torch.dataset import Sample, TicketDataset, TicketLoader

__all__ = ["Sample", "TicketDataset", "TicketLoader"]
