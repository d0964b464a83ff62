"""The names of the counters that clients report to the daemon.

The daemon shows each of these, and sums up all others as `other`, so that a client cannot make the daemon's metrics
grow by inventing names.
"""

from __future__ import annotations

from kvcache_proto.types import Refusal, Verdict

OTHER = "other"
MAX_NAMES = 256  # per message
MAX_GAIN = 1 << 48  # of one counter, per message
MAX_COUNT = 1 << 62  # sums stop here: the wire has 64 bits

_OF_ANSWERS = {
    *(f"{what}_{why.name.lower()}" for what in ("refused", "saves") for why in Refusal),
    *(f"verdict_{verdict.name.lower()}" for verdict in Verdict),
}
# Of the connection, lookups, saves, hints, copies and tiers.
_OF_EVENTS = """
    answers_lost answers_unasked attaches_put_off attaches_refused bad_frames breaker_closed breaker_open breaker_opened
    connects_failed handler_errors keeper_errors late_lookups late_reserves leases_lost
    leases_reclaimed links_lost odd_replies probes probes_late region_callback_errors requests_unanswered
    sessions_resumed socket_full stale_reports unsent

    leases_given_back lookups_declined_by_request lookups_declined_down
    lookups_declined_load_failed lookups_declined_loads_fail lookups_declined_lora lookups_declined_lora_unread
    lookups_declined_multimodal lookups_declined_prompt_embeds lookups_declined_rank lookups_declined_slow
    lookups_declined_streaming lookups_declined_unaligned lookups_declined_weights lookups_down lookups_not_wanted
    lookups_over_budget lookups_refused lookups_unanswered lookups_waited_for_load lookups_waited_for_quota
    lookups_waited_for_tier loads_behind_waiting loads_without_room
    notes_dropped notes_unsent prefetches prefetches_refused stale_prefetches stale_releases waits_declined_slow

    reserves_down reserves_refused reserves_unanswered blocks_saved_again device_reports_unsent evictions_missed
    saves_dropped saves_failed saves_missed saves_of_another_region
    saves_of_odd_places saves_refused saves_unavailable settles_of_another_region settles_refused settles_sent_again
    settles_unanswered stale_attaches stale_detaches stale_settles stale_client_reports refused_unavailable

    hints_invalid hints_too_long hints_uncacheable hints_unknown_action hints_unknown_protocol hints_unsent
    retain_refused_count retain_refused_other retain_refused_quota

    blocks_corrupt blocks_not_compressed blocks_verified canary_checked canary_failed canary_lost canary_mismatches
    canary_requests canary_skipped chunks_not_pulled invalidations_unsent drains_cut_short load_blocks_failed
    load_ends_failed load_us loaded_bytes loads_shared peer_messages_unsent pulled_bytes
    loads_fail loads_failed loads_layered loads_of_another_boundary loads_of_another_region loads_of_odd_places
    loads_unannounced needed_blocks needed_bytes save_ends_failed save_us saved_bytes saves_given_away sums_failed

    tier_checksums_wrong tier_headers_wrong tier_internal tier_removals_refused tier_slots_lost tier_store_failed
    tier_writes_overtaken tier_writes_refused
"""
CLIENT_COUNTS = frozenset({*_OF_EVENTS.split(), *_OF_ANSWERS})
