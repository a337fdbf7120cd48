"""The tests that `make test` leaves out because they take long, by the quick tests that try the same claim there.

`make test-all` and a `pytest` without `-m` run both. A test is its path below `tests/`, its name and, for some rows of
a table, their ids; `tests/test_architecture.py` checks that quick tests exist and are not left out themselves.
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
                *("multi-frequency", "KTO", "objectives of episodes", "crossover", "algorithm as a gene"),
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
    # -- what pages show -----------------------------------------------------------------------------------------------
    "test_tutorials.py::test_what_a_tutorial_imports_exists": tuple(
        f"test_tutorials.py::test_tutorial_runs[{name}]"
        for name in (
            *("01_first_population", "03_read_a_run", "05_own_environment", "06_tools", "08_reward_hacking"),
            *("09_evolving_the_reward", "10_after_the_run"),
        )
    ),
    "test_readme.py::test_python_runs[start-0]": ("test_readme.py::test_python_runs[README-0]",),
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
    ),
    "cli/test_output.py::test_ascii_is_enough": ("cli/test_output.py::test_a_run_in_ascii",),
    "cli/test_report_command.py::test_a_live_report_of_finished_runs_is_a_report": (
        "cli/test_report_command.py::test_a_live_report_follows_its_run",
    ),
    "test_installation.py::test_no_module_that_is_imported_needs_posix": (
        "test_installation.py::test_a_run_needs_nothing_that_only_posix_has",
    ),
    "test_pretended_cuda.py::test_the_tests_of_a_gpu": ("test_pretended_cuda.py::test_a_run",),
}
"""Quick test: what it stands for in `make test`. A name without brackets stands for all rows of its table."""
