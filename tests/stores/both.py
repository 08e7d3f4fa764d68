"""Which of the kernel's tests run over both stores: whole files and the most telling of others, and with SDS_TEST_SCALE=full
all that open a record, but for what is SQLite's alone (`pytest.mark.sqlite_alone` says why).

SDS_TEST_STORE=postgresql runs the whole of tests/kernel over PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.scale import scale

WHOLE = [
    "audit.test_audit_tables",
    "audit.test_orders",
    "audit.test_sealed_rows",
    "context.test_memory_store",
    "executor.test_breaker",
    "executor.test_late_executor",
    "flow.test_lease",
    "human.test_attestation",
    "human.test_returned",
    "human.test_waiting",
    "operations.test_accepted",
    "operations.test_adopted_events",
    "operations.test_adopted_rows",
    "operations.test_erasure",
    "operations.test_labels",
    "reconciliation.test_carried_out",
    "registry.test_aggregate_thresholds",
    "registry.test_authority",
    "registry.test_carried_spend",
    "registry.test_contract_versions",
    "saga.test_accepted",
    "saga.test_compensation",
    "storage.test_transactions",
    "storage.test_vault",
]
SOME = [
    "test_a_case_that_cannot_be_read_is_listed_as_such_and_hides_no_other",
    "test_a_change_is_carried_out_instead_of_what_the_agent_proposed",
    "test_a_contract_is_revoked_once_with_who_when_and_why",
    "test_a_draw_that_comes_between_reasoning_and_reservation_is_seen",
    "test_a_dropped_entry_is_found_and_named",
    "test_a_dropped_entry_whose_followers_move_up_is_found",
    "test_a_flow_is_read_back_whole",
    "test_a_flow_record_shows_a_parent_with_its_children_and_what_was_undone",
    "test_a_fresh_key_is_for_what_came_to_nothing_outside_not_for_what_only_waited",
    "test_a_late_sender_and_recovery_together_pay_once",
    "test_a_missing_trigger_or_index_is_named",
    "test_a_moved_ticket_is_not_paid",
    "test_a_paid_ticket_is_not_forgotten_under_another_name",
    "test_a_record_put_back_sends_the_same_key_for_the_same_event",
    "test_a_record_whose_windows_are_not_there_yet_fills_them_from_its_ledger_once",
    "test_a_refund_is_paid_once_and_recorded_whole",
    "test_a_rejected_attempt_may_be_followed_by_a_better_one",
    "test_a_saga_whose_steps_all_succeed_is_closed_and_each_step_is_a_child_of_its_own",
    "test_a_second_resolution_is_refused_and_says_whose_the_first_was",
    "test_a_sliding_window_is_for_each_value_of_its_field",
    "test_a_source_that_shows_what_was_paid_may_have_another_name_once_no_order_is_in_flight",
    "test_a_trigger_that_does_not_belong_is_named",
    "test_an_absent_order_is_sent_again_with_the_same_key_when_that_is_safe",
    "test_an_older_head_still_holds_after_more_was_written",
    "test_an_order_whose_sender_died_is_resolved_after_its_lease",
    "test_an_unknown_order_that_was_paid_is_resolved_by_its_key",
    "test_authority_is_asked_for_again_inside_the_reserving_transaction",
    "test_entries_cut_off_at_the_end_are_seen_only_with_a_head",
    "test_halting_and_resuming_are_written_down_once",
    "test_halting_binds_every_kernel_over_the_store",
    "test_stopped_at_any_step_a_humans_word_about_an_order_settles_it_whole_or_not_at_all",
    "test_stopped_at_any_step_an_event_is_paid_at_most_once_and_nothing_is_lost",
    "test_the_check_reads_one_moment_while_decisions_go_on",
    "test_the_record_says_who_decided_what_when_why_and_on_what",
    "test_the_reserving_transaction_itself_holds_the_spend_limits",
    "test_the_resources_of_a_key_are_its_own_whatever_other_keys_it_looks_like",
    "test_two_kernels_racing_for_the_last_cents_never_pass_the_limit",
    "test_what_a_decision_proves_stays_after_the_sweep",
    "test_what_is_asked_for_begins_before_the_last_order_whatever_the_clock_showed_at_an_earlier_one",
    "test_what_is_held_is_subtracted_from_live_state",
    "test_what_is_taken_over_is_taken_over_once",
    "test_what_nobody_decided_is_a_humans_in_the_end_and_charged_to_nobody",
    "test_what_waits_is_listed_oldest_first_with_what_is_proposed_and_its_impact",
    "test_what_was_done_is_undone_latest_first",
    "test_where_the_executor_lists_nothing_is_ordered_until_the_rest_is_taken_over",
    "test_whoever_reactivates_has_looked_and_the_windows_begin_anew",
]
OF_ONE_STORE = ["storage.test_postgres", "storage.test_postgres_schema"]
RECORD = {"folder", "tmp_path", "tmp_path_factory"}  # who is given none of these opens no record


def runs_over_both(module: str, test: str, fixtures: Iterable[str]) -> bool:
    """Tell whether a test is one of these. `module`: its dotted name; `fixtures`: all that it is given."""
    name = module.removeprefix("tests.kernel.")
    if scale(0, 1):
        return name not in OF_ONE_STORE and not RECORD.isdisjoint(fixtures)
    return name in WHOLE or test in SOME
