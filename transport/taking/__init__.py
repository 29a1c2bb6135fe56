"""Payloads of rings that are taken over the wire: decisions, and what one TAKE brought; no I/O.

batch    `TakenBatch`: the payloads of one answer, whatever their schemas
parts    `TakenPart`: the same as a part of a batch in place
batches  `in_place(parts, Shape(layout="packed"), schema)`: one batch of several answers and mapped claims
plans    what `take_batch` of the two clients does
finishing, outcomes  FINISH, its answer, and what became of claims whose answer was lost
takers   which rings are asked for how many payloads
"""
