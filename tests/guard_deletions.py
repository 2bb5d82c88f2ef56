"""Edits of the shipped spec that a person might make by hand, each with the property that must fall.

Each is (name, file, text before, text after, properties of which one must be refuted). The text before
must stand in the file exactly once, so a change of the spec that moves it is noticed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlt_fsm.schema import spec_directory


@dataclass(frozen=True)
class Edit:
    """One hand edit and what it must break."""

    name: str
    file: str
    before: str
    after: str
    breaks: tuple[str, ...]


EDITS = (
    Edit(
        "release_source_with_posted_handles",
        "retirement.yaml",
        "when: {no_handle: handles == 0, no_kernel: kernels == 0, no_staging_copy: not staging}",
        "when: {no_kernel: kernels == 0, no_staging_copy: not staging}",
        ("no_send_after_reuse", "no_write_after_reuse"),
    ),
    Edit(
        "release_source_before_the_last_device_event",
        "retirement.yaml",
        "when: {no_handle: handles == 0, no_kernel: kernels == 0, no_staging_copy: not staging}",
        "when: {no_handle: handles == 0, no_staging_copy: not staging}",
        ("no_chunk_after_reuse",),
    ),
    Edit(
        "release_source_before_the_staging_copy",
        "retirement.yaml",
        "when: {no_handle: handles == 0, no_kernel: kernels == 0, no_staging_copy: not staging}",
        "when: {no_handle: handles == 0, no_kernel: kernels == 0}",
        ("no_chunk_after_reuse",),
    ),
    Edit(
        "release_destination_with_a_writer",
        "retirement.yaml",
        "when: {no_writer: not writers, no_step: kernels == 0, no_binding_copy: not binding}",
        "when: {no_step: kernels == 0, no_binding_copy: not binding}",
        ("no_write_after_reuse",),
    ),
    Edit(
        "release_destination_before_the_last_step",
        "retirement.yaml",
        "when: {no_writer: not writers, no_step: kernels == 0, no_binding_copy: not binding}",
        "when: {no_writer: not writers, no_binding_copy: not binding}",
        ("no_step_after_reuse",),
    ),
    Edit(
        "release_destination_before_the_binding_copy",
        "retirement.yaml",
        "when: {no_writer: not writers, no_step: kernels == 0, no_binding_copy: not binding}",
        "when: {no_writer: not writers, no_step: kernels == 0}",
        ("no_step_after_reuse",),
    ),
    Edit(
        "cancel_safe_before_p_released",
        "cancellation.yaml",
        """    to: requested
    when: {p_works: 'Coordinator.state in {prefilling, committed}'}
    send: {prefill: cancel, decode: cancel}""",
        """    to: safe
    when: {p_works: 'Coordinator.state in {prefilling, committed}'}
    send: {prefill: cancel, decode: [cancel, {cancel_safe: {count: '0'}}]}""",
        ("no_write_after_reuse",),
    ),
    Edit(
        "a_dead_writer_taken_for_a_safe_one",
        "cancellation.yaml",
        "{on: lose_prefill, from: requested, to: fenced, send: {decode: fence}}",
        "{on: lose_prefill, from: requested, to: safe, send: {decode: {cancel_safe: {count: '0'}}}}",
        ("no_write_after_reuse",),
    ),
    Edit(
        "a_late_cancel_is_not_told",
        "cancellation.yaml",
        """    when: {d_has_all: 'Coordinator.state in {received, decoding}'}
    send: {decode: cancel}
    doc: P has its ack""",
        """    when: {d_has_all: 'Coordinator.state in {received, decoding}'}
    doc: P has its ack""",
        ("a_cancel_reaches_both", "handled:to_decode.fence"),
    ),
    Edit(
        "a_local_done_taken_for_delivery",
        "handoff.yaml",
        "when: {count_known: committed, all_heard: heard == expected, awaited: DestinationRetirement.writers}",
        "when: {count_known: committed, awaited: DestinationRetirement.writers}",
        ("no_write_after_reuse",),
    ),
    Edit(
        "a_cancel_taken_for_the_end_of_writing",
        "handoff.yaml",
        "when: {count_known: committed, all_heard: heard == expected, awaited: DestinationRetirement.writers}",
        "when: {all_heard: heard == expected, awaited: DestinationRetirement.writers}",
        ("no_write_after_reuse",),
    ),
    Edit(
        "notifications_dropped_after_a_cancel",
        "handoff.yaml",
        """    from: [receiving, over]
    when: {first_time: seq not in seen}
    set: {heard: heard + 1, seen: 'add(seen, seq)'}""",
        """    from: [receiving, over]
    when: {first_time: seq not in seen}
    set: {heard: heard if DestinationRetirement.state == retiring else heard + 1, seen: 'add(seen, seq)'}""",
        ("all_can_retire", "every_request_retires"),
    ),
    Edit(
        "no_fence_once_p_has_settled",
        "cancellation.yaml",
        """    from: safe
    to: fenced
    send: {decode: fence}""",
        """    from: safe
    to: fenced""",
        ("all_can_retire", "every_request_retires"),
    ),
    Edit(
        "a_suspended_request_keeps_its_slot_for_ever",
        "lifecycle.yaml",
        "  - {on: suspend, from: open, set: {free: free + 1}}",
        "  - {on: suspend, from: open}",
        ("slots_are_conserved",),
    ),
    Edit(
        "activation_before_all_notifications",
        "handoff.yaml",
        "when: {count_known: committed, all_heard: heard == expected}",
        "when: {count_known: committed}",
        ("activated_only_complete", "handled:hear"),
    ),
    Edit(
        "activation_before_the_count_is_known",
        "handoff.yaml",
        "when: {count_known: committed, all_heard: heard == expected}",
        "when: {all_heard: heard == expected}",
        ("activated_only_complete", "handled:hear"),
    ),
    Edit(
        "a_duplicate_notification_counted_twice",
        "handoff.yaml",
        "    when: {first_time: seq not in seen}\n",
        "",
        ("activated_only_complete", "handled:hear"),
    ),
    Edit(
        "ack_tied_to_activation",
        "handoff.yaml",
        """to: received, send: {prefill: ack}, doc: "Independent of compute admission on D."}
  - {on: activated, from: received, to: decoding}""",
        """to: received}
  - {on: activated, from: received, to: decoding, send: {prefill: ack}}""",
        ("a_receipt_frees_p", "every_request_retires"),
    ),
    Edit(
        "commit_before_everything_is_posted",
        "handoff.yaml",
        "      all_posted: ready == 0\n",
        "",
        ("activated_only_complete",),
    ),
    Edit(
        "commit_before_everything_is_computed",
        "handoff.yaml",
        "      all_computed: SourceRetirement.kernels == 0\n      row_staged: not SourceRetirement.staging\n",
        "",
        ("activated_only_complete", "handled:chunk_done", "handled:copy_done"),
    ),
    Edit(
        "admission_without_destination_credit",
        "lifecycle.yaml",
        "      destination_fits: destination >= Coordinator.destination_need\n",
        "",
        ("credits_are_promises", "handled:to_decode.reserve", "bounds:credits.destination"),
    ),
    Edit(
        "decode_memory_goes_before_its_writer",
        "lifecycle.yaml",
        "when: {writer_gone: 'prefill_worker.state in {stopped, failed}', nothing_live: credits.live == 0}",
        "when: {nothing_live: credits.live == 0}",
        ("memory_outlives_writers",),
    ),
    Edit(
        "a_decode_worker_stops_with_live_requests",
        "lifecycle.yaml",
        "when: {writer_gone: 'prefill_worker.state in {stopped, failed}', nothing_live: credits.live == 0}",
        "when: {writer_gone: 'prefill_worker.state in {stopped, failed}'}",
        ("all_can_retire", "every_request_retires"),
    ),
    Edit(
        "a_failed_link_used_again",
        "handoff.yaml",
        "    when: {computed: ready > 0, domain_clear: domain.state == clear}",
        "    when: {computed: ready > 0}",
        ("a_failed_link_is_not_used",),
    ),
    Edit(
        "drained_with_a_handle_open",
        "handoff.yaml",
        "to: drained, when: {all_terminal: SourceRetirement.handles == 0}}",
        "to: drained}",
        ("drained_is_drained",),
    ),
    Edit(
        "a_slot_returned_that_was_not_taken",
        "lifecycle.yaml",
        "{on: cancel, from: open, when: {was_active: Import.state == active}, set: {free: free + 1}}",
        "{on: cancel, from: open, set: {free: free + 1}}",
        ("slots_are_conserved",),
    ),
    Edit(
        "a_step_before_the_row_is_bound",
        "retirement.yaml",
        "{on: step, from: held, when: {row_bound: not binding}, set:",
        "{on: step, from: held, set:",
        ("steps_on_bound_rows",),
    ),
    Edit(
        "a_prompt_without_a_compute_credit",
        "lifecycle.yaml",
        "      compute_fits: compute > 0\n",
        "",
        ("bounds:credits.compute", "compute_credits_are_conserved"),
    ),
    Edit(
        "a_record_forgotten_before_d_released",
        "handoff.yaml",
        "    when: {source_settled: source_released, destination_settled: destination_released}",
        "    when: {source_settled: source_released}",
        ("handled:from_decode", "one_owner_each", "bounds:credits.live", "destination_credits_are_conserved"),
    ),
)


def apply(edit: Edit, directory: Path) -> Path:
    """Write a copy of the shipped spec with the edit into `directory`; return it."""
    for path in spec_directory().glob("*.yaml"):
        if path.name == "schema.yaml":
            continue
        text = path.read_text(encoding="utf-8")
        if path.name == edit.file:
            assert text.count(edit.before) == 1, f"{edit.name}: its text stands {text.count(edit.before)} times"
            text = text.replace(edit.before, edit.after)
        (directory / path.name).write_text(text, encoding="utf-8")
    return directory
