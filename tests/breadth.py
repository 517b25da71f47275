"""Cases that only `make test-all` runs: for each test, the share of cases that `make test` keeps.

The kept case proves the behaviour; the others prove it for more families, shapes, dtypes, modes or
seeds. 0 keeps none: a cheaper test covers the behaviour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import pytest

ONE_IN: Final[dict[str, dict[str, int]]] = {
    "tests/bench/kernels/test_attention_cost.py": {
        "test_both_sides_run": 0,
    },
    "tests/bench/test_workloads.py": {
        "test_a_file_is_the_same_every_time": 4,
    },
    "tests/chaos/test_chaos.py": {
        "test_every_line_gets_its_row_once_and_in_order": 0,
    },
    "tests/engine/endpoints/test_decision_probabilities.py": {
        "test_each_option_has_the_sum_over_every_tokenization": 4,
        "test_codes_of_many_options_are_summed_too": 16,
    },
    "tests/engine/kernels/cpu/test_compile_all.py": {
        "test_no_run_calls_a_kernel_that_is_not_compiled_beforehand": 0,
    },
    "tests/engine/kernels/test_backends.py": {
        "test_any_steps_give_plain_attention": 8,
        "test_in_bf16_it_is_plain_attention_up_to_rounding": 2,
        "test_tokens_of_an_image_see_up_to_the_end_in_their_step": 5,
        "test_bidirectional_tokens_see_the_whole_sequence": 6,
    },
    "tests/engine/kernels/test_recurrence.py": {
        "test_chunks_of_any_length_are_the_sequence_computed_whole": 6,
    },
    "tests/engine/kernels/test_sampling.py": {
        "test_tokens_come_as_often_as_they_should": 4,
    },
    "tests/engine/kernels/triton/test_attention.py": {
        "test_long_contexts_are_cut_and_joined": 2,
        "test_steps_give_plain_attention": 4,
    },
    "tests/engine/kernels/triton/test_latent.py": {
        "test_long_contexts_are_cut_and_joined": 2,
        "test_steps_give_what_torch_gives": 3,
    },
    "tests/engine/kernels/triton/test_whole_model.py": {
        "test_quantised_weights_agree_with_dequantised_ones": 2,
        "test_rows_are_those_of_a_cpu": 3,
    },
    "tests/engine/loop/test_cuda_graphs.py": {
        "test_rows_are_the_same_where_the_device_keeps_ids": 3,
        "test_rows_are_those_of_the_plain_loop": 4,
        "test_a_capture_reads_no_value_from_the_device": 4,
    },
    "tests/engine/loop/test_generation_memory.py": {
        "test_steps_grow_again_once_there_is_memory": 4,
    },
    "tests/engine/loop/test_speech.py": {
        "test_a_long_recording_is_transcribed_window_by_window": 3,
        "test_a_streamed_recording_yields_its_windows": 3,
    },
    "tests/engine/model/encoders/test_parity.py": {
        "test_vectors_are_those_of_sentence_transformers": 4,
    },
    "tests/engine/model/encoders/test_transformers_model.py": {
        "test_the_encoder_of_a_t5_gives_vectors": 4,
    },
    "tests/engine/model/families/test_families.py": {
        "test_every_number_of_an_architecture_counts": 3,
        "test_missing_fields_have_transformers_defaults": 5,
    },
    "tests/engine/model/speech/test_loading.py": {
        "test_a_model_is_the_function_that_transformers_has": 3,
    },
    "tests/engine/model/test_batch_invariance.py": {
        "test_reads_are_the_same_bytes_in_all_ways": 4,
    },
    "tests/engine/model/test_compile_kernels.py": {
        "test_every_kernel_of_a_run_is_compiled_beforehand": 0,
    },
    "tests/engine/model/test_native.py": {
        "test_with_the_reference_in_place_of_kernels_it_is_the_same_function": 4,
    },
    "tests/engine/model/test_tensor_parallel.py": {
        "test_shares_come_to_the_logits_of_the_whole": 5,
    },
    "tests/engine/model/weights/test_checkpoint.py": {
        "test_a_familys_saved_weights_are_complete": 4,
    },
    "tests/engine/model/weights/test_sanity.py": {
        "test_a_model_that_could_write_nothing_but_noise_is_refused": 6,
    },
    "tests/engine/parallel/test_graphs.py": {
        "test_rows_are_those_of_the_plain_loop": 3,
    },
    "tests/engine/parsers/test_bare_calls.py": {
        "test_a_text_with_many_beginnings_is_parsed_once": 4,
    },
    "tests/engine/test_adapter_parity.py": {
        "test_greedy_tokens_are_those_of_merged_weights": 4,
        "test_in_bf16_scores_are_as_near_to_fp32_as_those_of_merged_weights": 0,
    },
    "tests/engine/test_demo_speech.py": {
        "test_every_token_matches_transformers": 0,
    },
    "tests/engine/test_parity.py": {
        "test_greedy_tokens_and_logprobs_match_eager_attention": 8,
        "test_in_bf16_scores_are_as_close_to_fp32_as_eager_attention": 3,
    },
    "tests/engine/test_vision_parity.py": {
        "test_greedy_tokens_match_generate": 2,
    },
    "tests/handler/intake/test_work_units.py": {
        "test_messages_in_any_order_and_twice_change_nothing": 3,
        "test_runs_may_die_at_any_moment": 3,
    },
    "tests/handler/worker/test_faults.py": {
        "test_a_service_that_fails_for_a_while_is_called_again": 3,
    },
    "tests/handler/worker/test_kept_results.py": {
        "test_a_pack_that_is_not_as_it_was_costs_its_results": 3,
        "test_a_store_that_cannot_be_used_costs_no_line": 2,
    },
    "tests/infra/test_modes.py": {
        "test_templates_of_a_mode_pass_the_checks": 3,
    },
    "tests/infra/test_partitions.py": {
        "test_a_deployment_names_nothing_of_another_partition": 3,
    },
    "tests/offline/engine/test_warm_start.py": {
        "test_a_warm_start_imports_no_transformers_and_gives_the_same_rows": 0,
    },
    "tests/offline/run/test_faults.py": {
        "test_a_call_that_fails_costs_no_finished_row": 5,
    },
    "tests/offline/run/test_shards.py": {
        "test_joined_shards_are_the_bytes_of_one_run": 3,
    },
    "tests/protocol/test_json_slices.py": {
        "test_no_call_of_the_parser_gets_more_than_a_slice": 4,
    },
    "tests/test_wheel.py": {
        "test_it_runs_next_to_modules_of_the_same_names": 0,
    },
}


def mark_breadth(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that `make test` leaves out as `long`."""
    num_seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        path, _, test = name.partition("::")
        count = ONE_IN.get(path, {}).get(test)
        if count is None or item.get_closest_marker("long"):
            continue
        if not count or num_seen[name] % count:
            item.add_marker(pytest.mark.long)
        num_seen[name] += 1
