"""Payloads of several stages: a stage writes its new fields and names its parents; a reader sees one payload.

parents   what a payload says of its parents, and groups that share what they have in common
payloads  reading: every part from where it lies, one acknowledgement for all of them
"""

from transport.joined.parents import PARENTS, Parent, with_parents, write_group
from transport.joined.payloads import JoinedPayload, join, read_joined

__all__ = ["PARENTS", "JoinedPayload", "Parent", "join", "read_joined", "with_parents", "write_group"]
