"""Measurements of the transport and, by the same work, of what else moves bytes between two processes.

loopback   our reads over each wire; the peers' rows beside them
job        write to consumed, with a queue between writers and trainers

Nothing here is imported by the transport itself. Every measurement runs in processes of its own, and what was read is
compared with what was written, byte by byte, while the clock stands.
"""
