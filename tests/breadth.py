"""Cases that only `make test-all` runs: for each test, the share of cases that `make test` keeps.

The kept case proves the behaviour; the others prove it for more families, shapes, dtypes, modes or
seeds. 0 keeps none: a cheaper test covers the behaviour. In a grid of several parameters, an odd
number keeps more of the values of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import pytest

ONE_IN: Final[dict[str, dict[str, int]]] = {
    "tests/batch/table/test_request_template.py": {
        "test_a_jinja_name_is_the_column_or_refused": 4,
    },
    "tests/batch/table/test_zstd.py": {
        "test_frames_are_unpacked_as_arrow_does": 2,
    },
    "tests/batch/test_damaged_cache.py": {
        "test_a_flipped_bit_never_gives_another_lines_reply": 4,
    },
    "tests/bench/kernels/test_attention_cost.py": {
        "test_both_sides_run": 0,
    },
    "tests/bench/test_workloads.py": {
        "test_a_file_is_the_same_every_time": 6,
        "test_a_file_names_a_model_and_ignores_the_end_token": 4,
    },
    "tests/chaos/test_chaos.py": {
        "test_every_line_gets_its_row_once_and_in_order": 0,
    },
    "tests/cli/test_early_stops.py": {
        "test_a_signal_in_an_import_ends_a_command_in_one_line": 4,
    },
    "tests/demo/test_speech.py": {
        "test_it_writes_down_held_out_digits": 2,
    },
    "tests/engine/endpoints/decisions/test_probabilities.py": {
        "test_each_option_has_the_sum_over_every_tokenization": 4,
        "test_codes_of_many_options_are_summed_too": 16,
    },
    "tests/engine/kernels/cpu/test_compile_all.py": {
        "test_no_run_calls_a_kernel_that_is_not_compiled_beforehand": 0,
    },
    "tests/engine/kernels/test_backends.py": {
        "test_any_steps_give_plain_attention": 15,
        "test_bidirectional_tokens_see_the_whole_sequence": 6,
        "test_in_bf16_it_is_plain_attention_up_to_rounding": 5,
        "test_tokens_of_an_image_see_up_to_the_end_in_their_step": 5,
    },
    "tests/engine/kernels/test_recurrence.py": {
        "test_a_row_that_is_only_read_stays_a_snapshot": 3,
        "test_chunks_of_any_length_are_the_sequence_computed_whole": 11,
    },
    "tests/engine/kernels/test_sampling.py": {
        "test_a_large_vocabulary_is_cut_at_the_same_token_as_a_small_one": 5,
        "test_tokens_come_as_often_as_they_should": 4,
    },
    "tests/engine/kernels/triton/test_attention.py": {
        "test_long_contexts_are_cut_and_joined": 4,
        "test_shared_prefixes_of_decodes_are_read_once": 3,
        "test_steps_give_plain_attention": 7,
    },
    "tests/engine/kernels/triton/test_block_scaled.py": {
        "test_products_that_torch_refuses_or_gets_wrong_use_our_tiles": 3,
    },
    "tests/engine/kernels/triton/test_elementwise.py": {
        "test_fused_quantisation_matches_two_passes": 2,
    },
    "tests/engine/kernels/triton/test_experts.py": {
        "test_a_quantised_mixture_agrees_with_the_dequantised_one": 4,
        "test_each_token_goes_through_its_own_experts": 3,
    },
    "tests/engine/kernels/triton/test_grouped_gemm.py": {
        "test_products_of_many_experts_are_each_ones_own": 5,
    },
    "tests/engine/kernels/triton/test_latent.py": {
        "test_long_contexts_are_cut_and_joined": 2,
        "test_steps_give_what_torch_gives": 5,
    },
    "tests/engine/kernels/triton/test_linear.py": {
        "test_few_rows_are_multiplied_by_few_bits": 2,
        "test_many_rows_are_multiplied_by_few_bits": 2,
    },
    "tests/engine/kernels/triton/test_qkv.py": {
        "test_heads_enter_as_the_reference_has_them": 5,
    },
    "tests/engine/kernels/triton/test_sampling.py": {
        "test_a_draw_falls_where_the_thresholds_put_it": 3,
    },
    "tests/engine/kernels/triton/test_whole_model.py": {
        "test_quantised_weights_agree_with_dequantised_ones": 2,
        "test_rows_are_those_of_a_cpu": 3,
    },
    "tests/engine/loop/test_cuda_graphs.py": {
        "test_a_capture_reads_no_value_from_the_device": 4,
        "test_a_graph_that_replays_other_numbers_is_not_used": 2,
        "test_a_replay_that_fails_costs_no_row": 2,
        "test_a_step_of_more_pages_than_graphs_have_room_for_is_launched": 2,
        "test_out_of_memory_there_are_no_graphs_any_more": 2,
        "test_rows_are_the_same_where_the_device_keeps_ids": 3,
        "test_rows_are_those_of_the_plain_loop": 7,
        "test_steps_that_cannot_be_captured_are_launched": 3,
    },
    "tests/engine/loop/test_generation_failures.py": {
        "test_a_device_that_fails_every_second_step_is_given_up": 3,
        "test_a_device_without_finite_numbers_ends_the_engine_and_fails_no_request": 3,
        "test_a_machine_without_a_disk_ends_the_engine_and_fails_no_request": 3,
        "test_a_page_that_a_culprit_never_filled_is_not_read": 3,
        "test_a_request_aborted_while_accused_gets_no_event": 3,
        "test_a_request_that_fails_every_step_it_is_in_is_the_only_one_to_fail": 5,
        "test_a_step_that_fails_once_costs_no_request": 3,
        "test_each_request_has_the_result_that_it_has_alone": 3,
        "test_every_request_may_be_a_culprit": 3,
        "test_logits_that_are_not_finite_fail_only_their_request": 5,
        "test_only_pages_derived_from_a_broken_row_are_forgotten": 3,
        "test_state_of_a_failed_request_is_not_reused": 3,
        "test_steps_that_fail_only_in_company_become_smaller": 3,
        "test_two_culprits_each_get_their_error": 3,
    },
    "tests/engine/loop/test_generation_memory.py": {
        "test_a_device_without_any_memory_ends_the_engine_and_fails_no_request": 3,
        "test_a_request_that_fits_only_alone_outlives_a_step_that_fails_once": 3,
        "test_a_request_that_fits_only_alone_soon_runs_alone": 3,
        "test_memory_is_freed_after_the_step_is_released": 3,
        "test_prompts_are_computed_in_smaller_chunks": 3,
        "test_sequences_that_started_with_the_step_start_again": 3,
        "test_steps_above_a_size_are_split_until_they_fit": 3,
        "test_steps_grow_again_once_there_is_memory": 4,
        "test_the_oldest_half_continues_undisturbed": 3,
        "test_with_varying_memory_each_request_has_the_result_that_it_has_alone": 3,
    },
    "tests/engine/loop/test_generation_scores.py": {
        "test_prompt_logprobs_cover_the_prompt_across_chunks": 3,
    },
    "tests/engine/loop/test_speech.py": {
        "test_a_long_recording_is_transcribed_window_by_window": 3,
        "test_a_streamed_recording_yields_its_windows": 3,
    },
    "tests/engine/loop/test_speech_graphs.py": {
        "test_a_replay_that_fails_costs_no_recording": 2,
    },
    "tests/engine/model/config/test_transformers_fields.py": {
        "test_a_network_is_the_same_whatever_other_types_fields_say": 12,
    },
    "tests/engine/model/encoders/test_causal.py": {
        "test_scores_of_decoders_are_those_of_sentence_transformers": 2,
        "test_vectors_of_decoders_are_those_of_sentence_transformers": 5,
    },
    "tests/engine/model/encoders/test_parity.py": {
        "test_a_prompt_that_is_left_out_is_read_but_not_pooled": 3,
        "test_every_way_of_pooling_is_that_of_sentence_transformers": 3,
        "test_in_bf16_vectors_point_the_same_way": 3,
        "test_scores_are_those_of_sentence_transformers": 4,
        "test_vectors_are_those_of_sentence_transformers": 4,
    },
    "tests/engine/model/encoders/test_transformers_model.py": {
        "test_the_encoder_of_a_t5_gives_vectors": 4,
        "test_the_row_of_padding_is_not_a_position": 4,
    },
    "tests/engine/model/families/test_families.py": {
        "test_a_field_that_its_class_never_reads_is_ignored_by_name": 4,
        "test_every_number_of_an_architecture_counts": 11,
        "test_missing_fields_have_transformers_defaults": 23,
    },
    "tests/engine/model/families/test_overrides.py": {
        "test_a_head_is_tied_if_the_whole_model_ties_it": 3,
        "test_yarn_by_an_override_is_yarn_by_the_config": 2,
    },
    "tests/engine/model/parity/test_layerwise.py": {
        "test_transformers_logits_and_windows_are_those_of_its_whole_class": 4,
    },
    "tests/engine/model/speech/test_loading.py": {
        "test_a_model_is_the_function_that_transformers_has": 3,
    },
    "tests/engine/model/test_batch_invariance.py": {
        "test_reads_are_the_same_bytes_in_all_ways": 8,
    },
    "tests/engine/model/test_compile_kernels.py": {
        "test_every_kernel_of_a_run_is_compiled_beforehand": 0,
    },
    "tests/engine/model/test_gguf.py": {
        "test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_of": 4,
        "test_quantized_weights_are_those_that_the_gguf_package_reads": 4,
    },
    "tests/engine/model/test_native.py": {
        "test_a_kernel_of_quantised_weights_is_compared_with_its_emulation": 4,
        "test_with_the_reference_in_place_of_kernels_it_is_the_same_function": 41,
    },
    "tests/engine/model/test_published.py": {
        "test_a_published_config_is_understood_and_comes_to_the_size_that_it_is_known_by": 4,
    },
    "tests/engine/model/test_tensor_parallel.py": {
        "test_shares_come_to_the_logits_of_the_whole": 9,
    },
    "tests/engine/model/vision/test_loading.py": {
        "test_a_folder_is_loaded_with_its_eye": 3,
        "test_a_kind_whose_images_are_not_known_is_served_for_text": 3,
        "test_a_model_with_unknown_image_preparation_is_served_for_text": 5,
        "test_a_tower_is_found_by_every_name_that_it_has_had": 2,
        "test_different_image_inputs_fail_the_check": 5,
        "test_it_is_proved_with_an_image": 3,
        "test_where_not_all_layers_fit_the_first_are_compared": 5,
    },
    "tests/engine/model/vision/test_quantised.py": {
        "test_a_model_of_quantised_text_sees": 4,
        "test_its_first_layers_are_compared_where_not_all_fit": 2,
    },
    "tests/engine/model/weights/quantised/test_loading.py": {
        "test_a_quantised_model_gives_the_logits_of_its_dequantised_copy": 2,
        "test_a_rank_reads_its_share_of_them": 4,
        "test_experts_are_quantised_one_by_one": 2,
        "test_quantised_weights_are_dequantised_for_models_of_transformers": 5,
        "test_read_weights_are_the_dequantised_numbers": 5,
        "test_scales_that_no_weight_was_quantised_by_are_refused": 4,
        "test_weights_are_made_fp8_as_they_are_read": 2,
        "test_weights_are_made_int8_for_a_cpu": 2,
    },
    "tests/engine/model/weights/test_checkpoint.py": {
        "test_a_familys_saved_weights_are_complete": 31,
        "test_the_text_of_a_model_of_images_is_served_by_its_own_weights": 4,
    },
    "tests/engine/model/weights/test_sanity.py": {
        "test_a_model_that_could_write_nothing_but_noise_is_refused": 6,
    },
    "tests/engine/model/weights/test_weights.py": {
        "test_shards_and_a_bare_base_hold_the_same_weights": 9,
    },
    "tests/engine/parallel/test_graphs.py": {
        "test_rows_are_those_of_the_plain_loop": 3,
    },
    "tests/engine/parsers/test_bare_calls.py": {
        "test_a_text_with_many_beginnings_is_parsed_once": 8,
    },
    "tests/engine/parsers/test_output_parser.py": {
        "test_a_text_with_many_beginnings_is_parsed_once": 3,
    },
    "tests/engine/storage/gguf/test_tokenizers.py": {
        "test_byte_level_ids_are_those_of_the_pre_tokenizer_that_the_file_names": 4,
    },
    "tests/engine/tasks/test_sparse_and_multi_vectors.py": {
        "test_broken_heads_of_bge_m3_are_refused": 2,
        "test_sparse_vectors_are_those_of_sentence_transformers": 3,
    },
    "tests/engine/tasks/test_token_classifiers.py": {
        "test_spans_equal_those_of_transformers": 5,
    },
    "tests/engine/tasks/test_vision.py": {
        "test_a_model_with_unknown_image_tokens_serves_only_text": 2,
        "test_a_template_without_image_support_is_an_error": 2,
        "test_an_image_that_exceeds_the_context_is_an_error": 2,
        "test_an_invalid_image_is_a_400_that_names_it": 2,
        "test_each_image_is_fetched_once": 2,
        "test_parameters_that_conflict_with_images_are_named": 2,
        "test_the_number_of_images_is_limited": 2,
    },
    "tests/engine/test_adapter_parity.py": {
        "test_greedy_tokens_are_those_of_merged_weights": 7,
        "test_in_bf16_scores_are_as_near_to_fp32_as_those_of_merged_weights": 0,
    },
    "tests/engine/test_demo_speech.py": {
        "test_every_token_matches_transformers": 0,
    },
    "tests/engine/test_parity.py": {
        "test_a_sampled_row_does_not_depend_on_other_rows": 2,
        "test_greedy_tokens_and_logprobs_match_eager_attention": 15,
        "test_in_bf16_scores_are_as_close_to_fp32_as_eager_attention": 9,
    },
    "tests/engine/test_vision_parity.py": {
        "test_greedy_tokens_match_generate": 4,
        "test_in_bf16_scores_are_as_close_to_fp32_as_transformers": 4,
        "test_prompt_scores_match_eager_attention": 4,
        "test_a_tower_failure_fails_only_its_request": 2,
        "test_text_alone_is_served": 4,
    },
    "tests/engine/text/test_truncation.py": {
        "test_a_very_long_text_is_read_only_as_far_as_needed": 3,
    },
    "tests/handler/worker/test_call_faults.py": {
        "test_a_call_that_fails_costs_no_row": 17,
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
    "tests/localstack/test_batches.py": {
        "test_a_bad_file_fails_with_its_reason": 4,
        "test_a_bad_option_fails_the_batch": 5,
    },
    "tests/localstack/test_local.py": {
        "test_a_file_that_cannot_be_a_batch_has_no_rows": 0,
        "test_the_example_file_is_answered_line_by_line": 0,
    },
    "tests/offline/engine/test_warm_start.py": {
        "test_a_warm_start_imports_no_transformers_and_gives_the_same_rows": 0,
    },
    "tests/offline/engine/test_weights.py": {
        "test_weights_that_cannot_be_had_end_it_with_a_sentence": 2,
    },
    "tests/offline/files/test_retry.py": {
        "test_new_files_torn_anywhere_are_gone_on_with": 2,
        "test_what_is_missing_runs_with_what_failed": 2,
    },
    "tests/offline/plan/test_forecast.py": {
        "test_steps_are_those_of_lines_that_start_when_others_end": 3,
        "test_the_end_is_forecast": 3,
    },
    "tests/offline/rows/test_page.py": {
        "test_a_person_reads_rows_in_a_browser": 2,
    },
    "tests/offline/run/test_deaths.py": {
        "test_a_chance_death_costs_no_time_in_which_lines_run_one_by_one": 3,
        "test_each_killer_gets_an_error_row_and_every_other_line_its_own": 7,
    },
    "tests/offline/run/test_faults.py": {
        "test_a_call_that_fails_costs_no_finished_row": 9,
    },
    "tests/offline/run/test_plan.py": {
        "test_a_killed_run_goes_on_under_another_plan": 2,
    },
    "tests/offline/run/test_reused_inputs.py": {
        "test_a_second_run_of_a_table_reuses_every_row": 3,
        "test_a_second_run_of_requests_reuses_every_row": 5,
        "test_equal_sampled_lines_keep_their_own_samples": 3,
    },
    "tests/offline/run/test_settings.py": {
        "test_other_settings_are_refused_before_the_model_loads": 5,
    },
    "tests/offline/run/test_shards.py": {
        "test_joined_shards_are_the_bytes_of_one_run": 3,
    },
    "tests/offline/run/test_stops.py": {
        "test_a_signal_while_the_model_loads_leaves_the_output_alone": 2,
    },
    "tests/offline/run/test_tables.py": {
        "test_a_run_that_is_killed_goes_on": 2,
    },
    "tests/offline/test_extras.py": {
        "test_every_package_of_an_extra_is_looked_for": 5,
    },
    "tests/protocol/test_json_slices.py": {
        "test_no_call_of_the_parser_gets_more_than_a_slice": 4,
    },
    "tests/server/local/test_process.py": {
        "test_a_batch_resumes_however_the_server_ends": 2,
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
