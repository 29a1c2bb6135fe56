"""Payloads of several stages: a stage writes its new fields and names its parents; a reader sees one payload.

parents   what a payload says of its parents, and groups that share what they have in common
payloads  reading: every part from where it lies, one acknowledgement for all of them
"""
