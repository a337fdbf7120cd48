"""The tests that `make test` leaves out because they take long, by the quick tests that try the same claim there.

`make test-all` and a `pytest` without `-m` run both. A test is its path below `tests/`, its name and, for a row of a
table, its id: a quick row beside its table without an id leaves the other rows out. `tests/test_architecture.py` checks
that quick tests exist and are not left out themselves.
"""

LEFT_OUT: dict[str, tuple[str, ...]] = {
    # -- runs that are killed, interrupted, resumed --------------------------------------------------------------------
    "faults/test_documented_runs.py::test_the_resume_command[default]": (
        "faults/test_documented_runs.py::test_commands_of_pages",
        "faults/test_documented_runs.py::test_the_resume_command[no algorithm]",
        "faults/test_documented_runs.py::test_the_resume_command[what init writes]",
        "faults/test_documented_runs.py::test_the_resume_command[passes over rows]",
        "faults/test_documented_runs.py::test_the_resume_command[several processes]",
        "faults/test_kill.py",
        "faults/test_resume_command.py::test_a_kill_before_the_first_checkpoint_of_a_manifest_with_defaults",
        "faults/test_run_date.py::test_a_run_resumed_on_another_day_has_the_same_bits",
    ),
    "faults/test_resume_kinds.py::test_each_iteration_in_another_process[PPO]": (
        *(
            f"faults/test_resume_kinds.py::test_each_iteration_in_another_process[{kind}]"
            for kind in (
                *("rank", "sharing", "reference that follows", "dynamic sampling", "knockout", "halving", "objectives"),
                *("multi-frequency", "KTO", "objectives of episodes", "crossover", "algorithm as a gene", "episodes"),
            )
        ),
        "faults/test_resume_kinds.py::test_a_run_that_a_saved_adapter_teaches",
        "training/test_exam_share.py::test_a_resumed_run_has_the_same_exams",
        "training/test_replay.py::test_a_resumed_replay_is_the_same_to_the_bit",
        "rollouts/test_generation_settings.py::test_a_run_with_stops_and_sampled_exams_resumes_to_the_bit",
        "training/test_what_was_set.py::test_a_run_with_bounds_goes_on_from_its_checkpoint",
        "training/test_population_of_one.py::test_a_run_with_one_agent_goes_on_as_if_never_interrupted",
        "rollouts/test_activated.py::test_a_run_goes_on_to_the_same_bits",
        "cli/test_gguf_runs.py::test_a_run_on_a_file_resumes_to_the_bit",
    ),
    "faults/test_resume.py::test_stopped_again_and_again": (
        "faults/test_resume.py::test_steps_are_counted_exactly",
        "faults/test_signals.py::test_a_process_is_killed_and_stopped_and_the_run_is_what_it_would_have_been",
    ),
    "faults/test_io_errors.py::test_an_error_at_any_operation_leaves_the_old_intact_and_is_told": (
        "faults/test_io_errors.py::test_a_run_on_a_disk_without_room_ends_in_one_sentence_and_can_go_on",
    ),
    "faults/test_locking.py::test_a_second_command_stops_before_its_imports_and_changes_nothing": (
        "cli/test_bad_input.py::test_a_directory_in_use_by_another_process",
        "runs/test_run_directory.py::test_one_of_many_that_start_at_once_proceeds",
    ),
    "faults/test_out_of_memory.py::test_an_update_is_equal_and_counts_nothing_twice": (
        "faults/test_out_of_memory.py::test_every_algorithm_goes_on_where_memory_runs_out_again_and_again",
    ),
    # -- several processes ---------------------------------------------------------------------------------------------
    "distributed/test_islands.py::test_two_islands_leave_the_same_files": (
        "distributed/test_islands.py::test_every_kind_of_agent_and_source",
        "distributed/test_islands.py::test_four_islands_and_what_they_go_on_with",
        "distributed/test_islands.py::test_islands_of_two_processes_each",
        "distributed/test_islands.py::test_the_clock_of_one_decides_for_all",
        "distributed/test_ray.py::test_interrupted_then_an_island_is_killed_and_the_bits_are_those_of_one_process",
        "training/test_trackers.py::test_of_several_islands_one_sends_the_metrics_of_all_agents",
    ),
    "distributed/test_processes.py::test_three_processes_talk_and_notice_a_loss": (
        "distributed/test_islands_faults.py::test_stopped_then_killed_then_killed_under_torchrun",
        "distributed/test_processes.py::test_processes_that_are_started_again_meet_each_other_and_not_the_dead",
    ),
    "distributed/test_ray.py::test_a_server_listens_to_this_machine_alone_and_asks_for_a_key": (
        "distributed/test_ray.py::test_a_cluster_without_room_says_what_it_has",
    ),
    "distributed/test_one_agent.py::test_rows_of_two_processes_are_one_batch": (
        "distributed/test_one_agent.py::test_two_processes_update_as_one",
        "distributed/test_one_agent_runs.py::test_two_processes_come_to_the_same_table_as_one",
    ),
    "distributed/test_one_agent.py::test_a_divided_base_computes_the_same": (
        "distributed/test_one_agent_runs.py::test_a_divided_base_stops_for_all_and_is_missed_by_all",
    ),
    # -- rows of tables ------------------------------------------------------------------------------------------------
    "faults/test_resume.py::test_stopped_after_any_event[6]": ("faults/test_resume.py::test_stopped_after_any_event",),
    "faults/test_signals.py::test_a_request_at_any_moment_is_heeded_after_the_iteration[5]": (
        "faults/test_signals.py::test_a_request_at_any_moment_is_heeded_after_the_iteration",
    ),
    "faults/test_locking.py::test_exactly_one_of_many_that_start_at_once_proceeds[open(sys.argv[1])-2]": (
        "faults/test_locking.py::test_exactly_one_of_many_that_start_at_once_proceeds[create(sys.argv[1], {}, 0)-5]",
        "faults/test_locking.py::test_exactly_one_of_many_that_start_at_once_proceeds[create(sys.argv[1], {}, 0)-8]",
        "faults/test_locking.py::test_exactly_one_of_many_that_start_at_once_proceeds[open(sys.argv[1])-5]",
        "faults/test_locking.py::test_exactly_one_of_many_that_start_at_once_proceeds[open(sys.argv[1])-8]",
    ),
    "faults/test_lost_lines.py::test_an_older_checkpoint_that_can_do_without_them_is_used[metrics.jsonl]": (
        "faults/test_lost_lines.py::test_an_older_checkpoint_that_can_do_without_them_is_used",
    ),
    "faults/test_sick_runs.py::test_an_agent_that_collapses_makes_room_for_a_mutant_of_the_elite[False]": (
        "faults/test_sick_runs.py::test_an_agent_that_collapses_makes_room_for_a_mutant_of_the_elite",
    ),
    "faults/test_out_of_memory.py::test_the_gradient_is_equal[backward-1-error4]": (
        "faults/test_out_of_memory.py::test_the_gradient_is_equal",
    ),
    "faults/test_order.py::test_the_size_of_micro_batches[GRPO]": (
        "faults/test_order.py::test_the_size_of_micro_batches",
        "faults/test_order.py::test_the_order_of_agents[PPO]",
        "faults/test_order.py::test_the_number_of_reward_workers",
    ),
    "faults/test_io_errors.py::test_a_thread_that_cannot_be_started_is_told": (
        "faults/test_io_errors.py::test_a_python_that_lacks_something_is_told",
    ),
    "faults/test_attacks.py::test_an_attack_ends_in_a_sentence[rows: a bomb of dictionaries]": (
        "faults/test_attacks.py::test_an_attack_ends_in_a_sentence[rows: a bomb of Parquet]",
        "faults/test_attacks.py::test_an_attack_ends_in_a_sentence[pattern: layers that backtrack in any engine]",
        "faults/test_attacks.py::test_an_attack_ends_in_a_sentence[reward model: a wide one]",
    ),
    "faults/test_attacks_on_scoring.py::test_what_brings_the_worker_down_costs_one_answer[kills the process]": (
        "faults/test_attacks_on_scoring.py::test_what_brings_the_worker_down_costs_one_answer",
    ),
    "faults/test_attacks_on_scoring.py::test_sizes_that_no_machine_makes_are_refused[chain_sum-params0]": (
        "faults/test_attacks_on_scoring.py::test_sizes_that_no_machine_makes_are_refused",
    ),
    "faults/test_attacks_on_scoring.py::test_scores_are_those_of_the_scorer_itself[polynomial_multiplication]": (
        "faults/test_attacks_on_scoring.py::test_scores_are_those_of_the_scorer_itself[intermediate_integration]",
        "faults/test_attacks_on_scoring.py::test_scores_are_those_of_the_scorer_itself[simple_integration]",
    ),
    "faults/test_fuzz.py::test_any_bytes_are_read_or_refused": (
        "faults/test_fuzz.py::test_damaged_bytes_are_read_or_refused[rows-parquet]",
        "faults/test_fuzz.py::test_damaged_bytes_are_read_or_refused[checkpoint-manifest]",
    ),
    "faults/test_hostile_rows.py::test_columns_of_parquet_and_csv": (
        "faults/test_hostile_rows.py::test_rows_of_thousands_of_columns_take_no_longer_than_their_size",
    ),
    "training/test_manifest.py::test_more_than_the_memory[overrides1-adapters]": (
        *(f"training/test_manifest.py::test_more_than_the_memory[overrides{row}-rollouts]" for row in (3, 4)),
        *(f"training/test_manifest.py::test_more_than_the_memory[overrides{row}-adapters]" for row in (0, 2)),
    ),
    "training/test_elites.py::test_the_elite_of_a_run_loads_with_its_algorithm_and_with_peft[GRPO]": (
        "training/test_elites.py::test_the_elite_of_a_run_loads_with_its_algorithm_and_with_peft",
    ),
    "training/test_not_learning.py::test_a_hack_that_was_learned_is_an_alarm[alike]": (
        "training/test_not_learning.py::test_a_hack_that_was_learned_is_an_alarm",
    ),
    "training/test_default_search.py::test_agents_that_cost_more_sit_iterations_out[False]": (
        "training/test_default_search.py::test_agents_that_cost_more_sit_iterations_out",
    ),
    "training/test_operators_in_runs.py::test_a_soup_is_the_weighted_mean_of_all_deltas": (
        "training/test_operators_in_runs.py::test_a_soup_is_the_elite_only_if_it_wins_on_the_second_panel",
    ),
    "training/test_operators_in_runs.py::test_a_child_of_two_equal_parents_is_the_same_policy": (
        "training/test_operators_in_runs.py::test_a_run_with_crossover_says_who_the_parents_are",
    ),
    "rewards/test_isolated.py::test_a_grader_that_misbehaves_is_counted_in_time_and_leaves_nothing[hangs]": (
        "rewards/test_isolated.py::test_a_grader_that_misbehaves_is_counted_in_time_and_leaves_nothing[powers]",
        "rewards/test_isolated.py::test_a_grader_that_misbehaves_is_counted_in_time_and_leaves_nothing[backtracks]",
        "rewards/test_isolated.py::test_a_grader_that_misbehaves_is_counted_in_time_and_leaves_nothing[forks]",
        "rewards/test_isolated.py::test_a_grader_that_misbehaves_is_counted_in_time_and_leaves_nothing[ignores_sigterm]",
    ),
    "rewards/test_grader_contract.py::TestLibrary": ("rewards/test_grader_contract.py::TestAccuracy",),
    "rewards/test_isolated.py::test_what_leaves_its_session_and_its_parent_is_killed_too[detaches_and_hangs]": (
        "rewards/test_isolated.py::test_what_leaves_its_session_and_its_parent_is_killed_too",
    ),
    "rewards/test_trl_convention.py::test_trl_functions_by_name_say_what_they_say": (
        "rewards/test_grader_contract.py::TestTRLMathematics",
    ),
    "rollouts/test_endpoint.py::test_a_failing_program_is_a_failed_episode[program10-timeout-within 1 seconds]": (
        "rollouts/test_endpoint.py::test_a_failing_program_is_a_failed_episode[hangs-timeout-within]",
    ),
    "rollouts/test_endpoint.py::test_bits_do_not_depend_on_what_arrives_when": (
        "rollouts/test_endpoint.py::test_an_update_has_the_same_bits_at_any_concurrency",
    ),
    "rollouts/test_activated.py::test_what_does_not_know_them_is_refused": (
        "rollouts/test_activated.py::test_episodes_and_critics_and_preferences_train",
    ),
    "models/test_padding_and_devices.py::test_a_pad_token_that_is_given_acts_with_a_model_s_name[both]": (
        "models/test_padding_and_devices.py::test_a_pad_token_that_is_given_acts_with_a_model_s_name",
    ),
    "algorithms/test_probe_learning.py::test_the_answer_to_one_digit[GRPO]": (
        "algorithms/test_probe_learning.py::test_the_answer_to_one_digit",
    ),
    "algorithms/test_sharing.py::test_an_agents_update_is_the_same_whoever_shares_the_batch": (
        "training/test_operators_in_runs.py::test_shared_experience_in_a_run",
    ),
    "cli/test_plan_command.py::test_the_proposed_micro_batch_is_the_planned_one[overrides2-False]": (
        "cli/test_plan_command.py::test_the_proposed_micro_batch_is_the_planned_one",
    ),
    "envs/test_answer_format.py::test_a_megabyte_takes_linear_time[boxed]": (
        "envs/test_answer_format.py::test_a_megabyte_takes_linear_time[last_number]",
    ),
    "faults/test_failing_graders.py::test_environments_that_fail_for_one_agent[raises-reward_error-True]": (
        "faults/test_failing_graders.py::test_environments_that_fail_for_one_agent[raises-reward_error-False]",
    ),
    "faults/test_failing_graders.py::test_environments_that_fail_for_one_agent[hangs-timeout-False]": (
        "faults/test_failing_graders.py::test_environments_that_fail_for_one_agent[hangs-timeout-True]",
    ),
    "faults/test_hostile_json.py::test_values_of_another_kind": (
        "faults/test_hostile_json.py::test_every_value_of_every_file_replaced_by_others",
    ),
    "faults/test_integrity.py::test_every_flip_and_every_cut_is_found_and_the_last_good_one_is_loaded": (
        "faults/test_integrity.py::test_resume_goes_on_from_the_last_good_one_and_ends_with_the_same_adapters",
    ),
    "faults/test_sick_runs.py::test_where_nobody_is_fit_there_is_no_elite": (
        "faults/test_sick_runs.py::test_weights_that_are_no_numbers_are_kept_and_gone_on_with_until_the_agent_goes",
    ),
    "hpo/test_fronts.py::test_noise_alone_passes_a_gate_at_most_as_often_as_it_says[names0]": (
        "hpo/test_fronts.py::test_noise_alone_passes_a_gate_at_most_as_often_as_it_says[names1]",
    ),
    "hpo/test_guard.py::test_collapse": (
        "training/test_default_search.py::test_an_agent_that_broke_at_the_end_is_replaced_by_an_earlier_one",
    ),
    "test_custom_code.py::test_a_grader_that_leaves_has_failed": (
        "test_custom_code.py::test_runs_with_graders_that_leave_and_that_meddle",
    ),
    "test_run.py::test_algorithms_of_data_need_no_more_than_their_name[DPO]": (
        "test_run.py::test_algorithms_of_data_need_no_more_than_their_name",
        "test_run.py::test_an_interrupted_run_goes_on_to_the_same_files",
    ),
    "test_evolution_benchmark.py::test_every_arm_is_a_valid_run_from_the_same_configuration[ours-right]": (
        "test_evolution_benchmark.py::test_every_arm_is_a_valid_run_from_the_same_configuration",
    ),
    # Of the hundred datasets of reasoning_gym, three.
    "envs/test_reasoning_gym_catalogue.py::test_every_dataset[gcd]": (
        "envs/test_reasoning_gym_catalogue.py::test_every_dataset",
    ),
    "envs/test_reasoning_gym_catalogue.py::test_every_dataset[countdown]": (),
    "envs/test_reasoning_gym_catalogue.py::test_every_dataset[maze]": (),
    "runs/test_hacks.py::test_the_right_answers_of_no_task_are_an_alarm[gcd]": (
        "runs/test_hacks.py::test_the_right_answers_of_no_task_are_an_alarm",
    ),
    "runs/test_hacks.py::test_the_right_answers_of_no_task_are_an_alarm[countdown]": (),
    "runs/test_hacks.py::test_the_right_answers_of_no_task_are_an_alarm[maze]": (),
    "envs/test_curriculum.py::test_every_curriculum[countdown]": (),
    "envs/test_curriculum.py::test_every_curriculum[maze]": (),
    "envs/test_curriculum.py::test_every_curriculum[gcd]": (
        "envs/test_curriculum.py::test_every_curriculum",
        "envs/test_curriculum.py::test_a_problem_is_that_of_a_plain_task_with_the_parameters_of_its_level[composite-params1]",
        "envs/test_curriculum.py::test_every_slow_curriculum_has_its_levels",
    ),
    "algorithms/test_family.py::test_it_solves_a_probe_of_known_optimum[RLOO-settings2]": (
        "algorithms/test_family.py::test_it_solves_a_probe_of_known_optimum",
    ),
    "algorithms/test_ppo_learning.py::test_a_population_solves_the_constant_target": (
        "algorithms/test_ppo_learning.py::test_ppo_solves_the_conditional_target",
        "algorithms/test_ppo_learning.py::test_the_critic_explains_returns_that_depend_on_the_prompt",
        "algorithms/test_ppo_learning.py::test_credit_reaches_the_first_turn_of_a_walk",
    ),
    "algorithms/test_dpo.py::test_micro_batches_accumulate_the_same_gradient[sigmoid]": (
        "algorithms/test_dpo.py::test_micro_batches_accumulate_the_same_gradient",
    ),
    "algorithms/test_sft.py::test_micro_batches_accumulate_the_same_gradient[True-dft]": (
        "algorithms/test_sft.py::test_micro_batches_accumulate_the_same_gradient",
    ),
    "algorithms/test_metrics_reducer.py::test_no_metric_depends_on_the_micro_batch[settings0]": (
        "algorithms/test_metrics_reducer.py::test_no_metric_depends_on_the_micro_batch",
    ),
    "algorithms/test_sharing.py::test_a_student_comes_near_its_teacher": (
        "algorithms/test_sharing.py::test_a_saved_adapter_teaches_every_agent_of_a_population",
    ),
    "test_population.py::test_grpo_solves_probes_of_known_optimum[task0-12-1.0-0.5]": (
        "test_population.py::test_grpo_solves_probes_of_known_optimum",
    ),
    "hpo/test_surrogate_worlds.py::test_no_elite_and_no_parent_is_ever_nan[tournament]": (
        "hpo/test_surrogate_worlds.py::test_no_elite_and_no_parent_is_ever_nan",
        "hpo/test_surrogate_worlds.py::test_searching_around_a_good_default_costs_little",
    ),
    # -- what pages show -----------------------------------------------------------------------------------------------
    "test_tutorials.py::test_what_a_tutorial_imports_exists": tuple(
        f"test_tutorials.py::test_tutorial_runs[{name}]"
        for name in (
            *("01_first_population", "03_read_a_run", "05_own_environment", "06_tools", "08_reward_hacking"),
            *("09_evolving_the_reward", "10_after_the_run"),
        )
    ),
    "test_readme.py::test_python_runs[start-0]": (
        "test_readme.py::test_python_runs[README-0]",
        "test_readme.py::test_python_runs[start-3]",
        "test_readme.py::test_python_runs[reliability-0]",
        "test_readme.py::test_python_runs[multi_turn-0]",
    ),
    "test_readme.py::test_train_commands_have_valid_options_and_settings": (
        "test_readme.py::test_train_commands_pass_every_check",
    ),
    "cli/test_progress.py::test_a_real_run_tells_its_story_in_order": (
        "test_readme.py::test_excerpts_of_the_main_job_have_the_lines_of_a_smaller_one",
        "test_readme.py::test_the_life_of_an_agent_is_told_as_shown",
    ),
    "cli/test_after.py::test_eval_finds_the_numbers_of_the_final_test": (
        "cli/test_after.py::test_the_page_shows_what_is_printed",
    ),
    "test_run.py::test_what_is_shown_is_what_the_command_shows": (
        "test_run.py::test_the_notebook_runs_and_shows_a_table",
    ),
    "test_peers_benchmark.py::test_tokens_of_our_arms": ("test_peers_benchmark.py::test_tokens_of_trl",),
    "test_user_types.py::test_a_misspelt_keyword_is_an_error[build_wheel-pyright]": (
        "test_user_types.py::test_a_misspelt_keyword_is_an_error[build_editable-mypy]",
    ),
    # -- scorers, graders, trackers ------------------------------------------------------------------------------------
    "faults/test_attacks_on_scoring.py::test_out_of_time_is_worth_nothing_and_the_worker_is_replaced": (
        "faults/test_attacks_on_scoring.py::test_time_and_memory_are_bounded",
    ),
    "envs/test_what_scorers_evaluate.py::test_the_search_sees_what_it_is_for": (
        "envs/test_what_scorers_evaluate.py::test_which_parameters_are_opened",
        "envs/test_what_scorers_evaluate.py::test_which_parameters_are_evaluated",
        "envs/test_what_scorers_evaluate.py::test_files_that_evaluate",
    ),
    "envs/test_reasoning_gym_catalogue.py::test_scorers_that_paid_for_nothing_do_not": (
        "envs/test_reasoning_gym_catalogue.py::test_what_pays_for_nothing_is_named",
    ),
    "rollouts/test_overlap.py::test_one_grader_of_several_works_early_and_in_exams_too": (
        "rollouts/test_overlap.py::test_trajectories_and_weights_are_those_of_grading_at_the_end",
    ),
    "training/test_trackers.py::test_every_metric_of_the_files_is_sent_under_its_agent": (
        "training/test_trackers.py::test_wandb_offline_has_the_whole_run_in_its_last_folder",
        "training/test_trackers.py::test_a_killed_process_has_sent_what_is_in_its_files",
    ),
    "surface/test_loops.py::test_the_loops_of_data_have_trackers_too": (
        "surface/test_loops.py::test_trackers_get_metrics_of_agents_and_the_selection",
    ),
    # -- learning and search -------------------------------------------------------------------------------------------
    "algorithms/test_probe_learning.py::test_the_answer_to_two_digits": (
        "test_multi_turn.py::test_it_learns_to_walk",
        "algorithms/test_probe_learning.py::test_a_walk_whose_only_reward_comes_last",
    ),
    "hpo/test_surrogate_searches.py::test_no_selection_is_nowhere_better": (
        "hpo/test_surrogate_searches.py::test_the_default_is_at_least_as_good_as_every_other_strategy",
        "hpo/test_surrogate_worlds.py::test_a_learning_rate_off_by_a_decade_is_found",
        "hpo/test_surrogate_worlds.py::test_steady_sub_populations_resist_the_greedy_trap",
    ),
    # -- the command and its machine -----------------------------------------------------------------------------------
    "cli/test_start.py::test_a_misspelt_task_or_parameter_is_found_without_torch": (
        "cli/test_start.py::test_what_is_deferred_works_when_it_is_used",
        "cli/test_start.py::test_a_dry_run_speaks_first_and_imports_nothing_needless",
        "cli/test_output.py::test_streams_that_are_closed_from_the_start",
    ),
    "cli/test_output.py::test_ascii_is_enough": ("cli/test_output.py::test_a_run_in_ascii",),
    "cli/test_report_command.py::test_a_live_report_of_finished_runs_is_a_report": (
        "cli/test_report_command.py::test_a_live_report_follows_its_run",
    ),
    "test_installation.py::test_no_module_that_is_imported_needs_posix": (
        "test_installation.py::test_a_run_needs_nothing_that_only_posix_has",
    ),
    "test_pretended_cuda.py::test_the_tests_of_a_gpu[test_agents_in_one_batch_compute_what_each_computes_alone]": (
        "test_pretended_cuda.py::test_a_run",
        "test_pretended_cuda.py::test_the_tests_of_a_gpu[test_a_few_iterations_train_every_agent]",
        "test_pretended_cuda.py::test_the_tests_of_a_gpu[test_a_resumed_run_is_the_run_that_was_not_stopped]",
    ),
    "cli/test_plan_command.py::test_what_a_person_reads": (
        "cli/test_plan_command.py::test_a_cpu_is_planned_for_in_bf16_as_it_computes",
        "cli/test_plan_command.py::test_the_proposed_settings_are_settings_of_a_manifest",
        "cli/test_plan_command.py::test_quantised_bases_and_mixtures_are_counted_as_they_lie_in_memory",
    ),
    "training/test_preflight.py::test_a_run_without_a_signal_does_not_begin": (
        "cli/test_probe.py::test_a_run_without_a_signal_stops_unless_it_is_forced",
    ),
    "faults/test_run_date.py::test_another_date_than_that_of_the_run_is_refused_where_it_is_shown": (
        "faults/test_run_date.py::test_two_processes_have_one_date",
    ),
    "test_gpu_script.py::test_what_comes_late_is_left_out_when_the_time_is_up": (
        "test_gpu_script.py::test_a_part_keeps_its_rows_whatever_becomes_of_it",
    ),
}
"""Quick test: what it stands for in `make test`."""
