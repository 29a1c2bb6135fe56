"""Every row of the table of docs/GUARANTEES.md has tests: the ones below, by the row's first words.

A row that is added, removed or renamed fails here until its tests are named; so does a test that is renamed.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_HEADER = "| what happens | consumed twice | lost | how |"
_HERE = "guarantees/"

# What a row's case is begun with → room/file: tests. The first ones, in this room, have a trainer and a writer as
# processes and compare the account of a run exactly.
TESTS: dict[str, dict[str, list[str]]] = {
    "a listener is killed, stopped or restarted": {
        "guarantees/test_listeners.py": [
            "test_a_listener_that_fails_between_claim_and_read",
            "test_a_listener_that_is_killed_in_the_middle_of_a_payload",
        ],
        "server/test_supervisor.py": [
            "test_a_killed_listener_is_back_on_its_port_and_meanwhile_the_other_one_serves",
            "test_a_stopped_listener_is_killed_by_the_watchdog_and_what_it_had_pinned_is_read_again",
        ],
    },
    "a connection breaks before, during or after the payload": {
        "guarantees/test_connections.py": [
            "test_a_connection_that_breaks_before_the_payload",
            "test_a_connection_that_breaks_in_the_middle_of_a_payload",
            "test_a_connection_that_breaks_between_payload_and_acknowledgement",
        ],
    },
    "a rollout worker is killed while it writes": {
        "guarantees/test_writers.py": [
            "test_what_a_killed_writer_was_writing_was_never_there_and_its_slot_is_free_again"
        ],
    },
    "a rollout worker is killed later, also with its supervisor": {
        "guarantees/test_writers.py": [
            "test_what_a_killed_writer_had_written_is_consumed",
            "test_what_writer_and_supervisor_that_are_killed_together_had_written_is_consumed",
        ],
        "server/test_supervisor_writers.py": [
            "test_what_nobody_reads_of_a_killed_writer_vanishes_after_the_linger_time"
        ],
    },
    "a restarted rollout worker takes its ring over, and its setup fails": {
        "guarantees/test_writers.py": [
            "test_a_ring_that_was_taken_over_by_a_writer_whose_setup_failed_keeps_its_payloads"
        ],
    },
    "a supervisor is killed": {
        "guarantees/test_writers.py": ["test_a_killed_supervisor_is_started_again_and_adopts_its_listeners"],
    },
    "a trainer that claims from the ring is killed": {
        "guarantees/test_trainers.py": [
            "test_what_a_killed_trainer_had_and_had_not_consumed_is_consumed_by_another_one",
        ],
    },
    "a trainer that claims from a mapped ring is stopped": {
        "guarantees/test_trainers.py": [
            "test_what_a_stopped_trainer_held_passes_to_another_one_and_its_own_consume_is_refused",
        ],
    },
    "a trainer that takes from rings over the network is killed, or its connection breaks": {
        "guarantees/test_trainers.py": [
            "test_what_a_killed_trainer_had_and_had_not_consumed_is_consumed_by_another_one",
        ],
        "guarantees/test_connections.py": ["test_a_connection_that_breaks_between_payload_and_acknowledgement"],
    },
    "the same trainer is stopped": {
        "guarantees/test_trainers.py": [
            "test_what_a_stopped_trainer_held_passes_to_another_one_and_its_own_consume_is_refused"
        ],
    },
    "a listener is killed while demands wait at it": {
        "guarantees/test_listeners.py": ["test_a_listener_that_is_killed_while_a_demand_waits"],
    },
    "two trainers claim from a ring at once": {
        "guarantees/test_trainers.py": ["test_trainers_that_claim_at_once_by_both_ways_get_every_payload_once"],
    },
    "a rank of a mesh (`Trainer.steps`) is killed": {
        "guarantees/test_meshes.py": ["test_ranks_that_are_killed_at_any_moment_learn_every_group_once"],
        "training/test_steps.py": [
            "test_what_was_not_consumed_comes_again_whole",
            "test_a_step_is_not_consumed_before_every_rank_has_learned",
        ],
    },
    "the rank of a mesh that plans is killed": {
        "guarantees/test_meshes.py": ["test_another_rank_plans_on_when_the_one_that_plans_is_killed"],
    },
    "all ranks of a mesh are killed": {
        "guarantees/test_meshes.py": ["test_ranks_that_are_killed_at_any_moment_learn_every_group_once"],
        "training/test_steps.py": ["test_a_record_leaves_out_what_a_checkpoint_has"],
    },
    "a rollout of a mesh is killed behind a group": {
        "guarantees/test_meshes.py": ["test_a_group_that_a_killed_rollout_writes_anew_is_learned_once"],
        "training/test_steps.py": [
            "test_a_group_that_is_written_anew_long_after_it_was_learned_is_left_out",
            "test_a_step_whose_rings_are_gone_is_given_up_when_all_ranks_begin_again",
        ],
    },
    "a job of a mesh goes back to a snapshot": {
        "guarantees/test_meshes.py": ["test_a_job_that_goes_back_to_a_snapshot_with_its_store_learns_every_group_once"],
    },
    "the store of a mesh is killed": {
        "guarantees/test_stores.py": [
            "test_a_store_that_is_killed_in_the_middle_of_a_step_and_comes_back_costs_nothing",
            "test_a_store_that_is_lost_is_an_error_on_every_rank_and_the_checkpoint_has_what_was_learned",
        ],
    },
    "a rollout is killed before a group is complete": {
        "guarantees/test_meshes.py": ["test_the_group_of_a_killed_rollout_is_given_up_by_name_or_completed"],
        "training/test_steps.py": ["test_a_group_that_will_not_complete_is_dropped_or_short"],
    },
    "the data of a mesh ends": {
        "guarantees/test_meshes.py": ["test_ranks_that_are_killed_at_any_moment_learn_every_group_once"],
        "training/test_steps.py": ["test_replicas_divide_the_groups_and_ranks_of_a_replica_get_the_same"],
    },
    "a trainer is killed while it takes or ends a claim": {
        "guarantees/test_listeners.py": [
            "test_a_trainer_that_is_killed_while_an_answer_with_claims_is_on_its_way",
            "test_a_trainer_that_is_killed_before_it_hears_that_its_consume_was_accepted",
        ],
    },
    "a connection breaks, or a listener is killed, while a trainer consumes what it took": {
        "guarantees/test_connections.py": ["test_a_connection_that_breaks_between_payload_and_acknowledgement"],
        "guarantees/test_listeners.py": ["test_a_listener_that_is_killed_behind_a_consume_that_it_accepted"],
    },
    "the same, and the ring's writer, supervisor and listeners are killed at once": {
        "guarantees/test_listeners.py": [
            "test_a_ring_killed_as_a_whole_behind_a_consume_is_asked_in_its_segment",
            "test_a_ring_elsewhere_that_dies_as_a_whole_behind_a_consume_tells_once_another_writer_has_it",
        ],
    },
    "the network between a trainer and a ring is away": {
        "guarantees/test_listeners.py": ["test_a_network_that_is_away_for_too_long_while_a_trainer_consumes"],
    },
    "every process of a job is killed, its rings in files": {
        "guarantees/test_files.py": [
            "test_a_ring_in_a_file_whose_processes_were_all_killed_is_served_again",
        ],
        "guarantees/test_restart.py": ["test_a_job_killed_whole_goes_on_over_files_and_on_several_hosts"],
    },
    "their host starts again": {
        "guarantees/test_restart.py": ["test_a_job_killed_whole_goes_on_over_files_and_on_several_hosts"],
    },
    "their host loses its power, with sync": {
        "guarantees/test_files.py": ["test_what_a_write_to_a_synced_ring_returned_for_is_there_after_a_loss_of_power"],
    },
    "their host loses its power, without": {
        "guarantees/test_files.py": [
            "test_without_a_sync_nothing_that_was_recorded_comes_again_and_nothing_new_is_refused"
        ],
    },
    "a host dies, or is out of reach": {
        "guarantees/test_hosts.py": [
            "test_the_payloads_of_a_host_that_dies_are_lost_and_reported",
            "test_a_host_that_dies_takes_its_ring_where_the_rings_are_the_queue",
        ],
    },
    "the whole job is killed": {
        "guarantees/test_restart.py": ["test_a_job_killed_whole_is_restored_with_other_rings_and_trains_on_each_once"],
        "snapshots/test_snapshots.py": [
            "test_a_delivery_is_in_the_record_or_in_the_snapshot_never_in_both_or_neither",
            "test_payloads_come_back_into_fewer_or_more_rings",
        ],
    },
    "the same, while a snapshot is taken or restored": {
        "guarantees/test_restart.py": [
            "test_a_job_killed_at_a_cut_or_while_it_restores_loses_nothing_and_repeats_nothing"
        ],
    },
    "the destination of snapshots is away, full or slow, or returns other bytes": {
        "guarantees/test_restart.py": ["test_a_job_whose_destination_fails_goes_on_and_is_restored_to_the_step_before"],
        "snapshots/test_snapshots.py": [
            "test_a_destination_that_is_away_makes_no_snapshot_and_holds_nothing",
            "test_a_full_destination_makes_no_snapshot_and_keeps_nothing",
            "test_training_goes_on_while_a_slow_destination_takes_a_snapshot",
            "test_a_damaged_snapshot_is_refused_and_nothing_of_it_is_restored",
        ],
    },
    "bytes change on the way": {
        "guarantees/test_connections.py": [
            "test_bytes_of_a_payload_that_change_on_the_way_are_noticed_and_read_again",
            "test_bytes_of_a_ticket_that_change_on_the_way_are_noticed_and_taken_again",
        ],
    },
}


def rows() -> list[str]:
    """The first cell of each row."""
    lines = (_ROOT / "docs" / "GUARANTEES.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index(_HEADER) + 2
    found = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            return found
        found.append(line.split("|")[1].strip())
    raise AssertionError("the table does not end")


@functools.cache
def names_in(file: str) -> set[str]:
    """Names of the test functions of a file of tests/."""
    tree = ast.parse((_ROOT / "tests" / file).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return {each.name for each in tree.body if isinstance(each, kinds) and each.name.startswith("test_")}


def case_of(row: str) -> str:
    """The longest beginning in TESTS of this row."""
    return max((case for case in TESTS if row.startswith(case)), key=len, default="")


def test_every_row_of_the_table_has_tests_and_every_entry_here_has_a_row() -> None:
    cases = [case_of(row) for row in rows()]
    assert [row for row, case in zip(rows(), cases, strict=True) if not case] == []
    assert sorted(cases) == sorted(TESTS), "each entry is for one row"


@pytest.mark.parametrize("case", TESTS)
def test_the_tests_of_a_row_are_there_and_one_of_them_is_of_this_room(case: str) -> None:
    missing = {file: set(names) - names_in(file) for file, names in TESTS[case].items()}
    assert {file: names for file, names in missing.items() if names} == {}
    assert any(file.startswith(_HERE) for file in TESTS[case])
