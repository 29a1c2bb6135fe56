"""The whole job: payloads from N writers to M trainers, written, claimed, read, consumed; ours and the peers alike.

plan     what is measured, and what is refused
work     what every writer and trainer does, whatever carries the payloads; runs without this package, too
ours     our writers and trainers, and their processes
driver   one repetition in fresh processes
rows     figures of all repetitions, the table with its ratios
trajectories, trajectory_rows    the same of trajectories, in one process
"""
