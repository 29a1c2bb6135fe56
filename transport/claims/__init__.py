"""Payloads of rings that this process has claimed: mapped ones of this host, and those of listeners elsewhere.

places      where the rings of a run are
takers      which rings are asked for how many payloads; decisions only
demands     what carries these out
connection  connections that take payloads and end their claims
outcomes    what became of ends whose answer was lost
batch       what one TAKE brought, its claims and their verdicts; taken_part: as a part of a trainer's batch
mapped, network   the two sources of claims
rings       the rings of a run, `FoundRings`; open: what their text names
"""
