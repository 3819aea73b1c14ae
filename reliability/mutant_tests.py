"""Which tests concern which source file, for reliability/mutants.py."""

SCHEDULE = ("engine/test_schedule.py", "engine/test_preemption.py", "engine/test_sharing.py", "engine/test_samples.py")
PARAMS = ("config/test_params.py", "engine/test_params_in_engine.py")
CHECKPOINTS = ("models/test_bad_checkpoints.py", "models/test_loading.py", "engine/test_memory_plan.py")
REQUESTS = ("server/test_bad_input.py", "server/test_answers_bad_input.py")

TESTS: dict[str, tuple[str, ...]] = {
    "common/params/": PARAMS,
    "common/params/checks.py": ("config/test_param_checks.py", "config/test_params.py"),
    "common/params/beam_search.py": ("config/test_param_checks.py",),
    "common/params/structured_outputs.py": ("config/test_structured_output_params.py",),
    "config/": ("config", "engine/test_memory_plan.py", "server/test_config.py"),
    "config/hf_config.py": CHECKPOINTS,
    "config/kv_cache.py": ("kv/test_windows.py", "engine/test_memory_plan.py"),
    "config/kv_layout.py": ("kv/test_windows.py", "engine/test_memory_plan.py", "sampling/test_scoring.py"),
    "config/machine.py": ("config/test_sizes_and_memory.py",),
    "config/model.py": CHECKPOINTS,
    "config/parallel.py": ("config/test_cpu_list.py", "config/test_bounds.py"),
    "config/cache.py": ("config/test_bounds.py",),
    "config/checkpoint/": CHECKPOINTS,
    "config/scheduler.py": ("config/test_bounds.py", "engine/test_policy.py"),
    "config/sizes.py": ("config/test_sizes_and_memory.py",),
    "engine/requests/": (*SCHEDULE, "engine/test_beam_search.py", "engine/test_logprobs.py"),
    "engine/requests/grammar_queue.py": ("grammar/test_waiting.py",),
    "engine/requests/input_processor.py": ("engine/test_params_in_engine.py", "hostile/test_offline.py"),
    "engine/requests/new_group.py": (
        "engine/test_params_in_engine.py",
        "test_scoring.py",
        "server/test_completions.py",
    ),
    "engine/requests/output.py": (
        *SCHEDULE,
        "engine/test_beam_search.py",
        "engine/test_logprobs.py",
        "engine/test_params_in_engine.py",
        "async_llm/test_output_processor.py",
        "server/test_streams.py",
    ),
    "engine/scheduling/": (*SCHEDULE, "engine/test_policy.py", "engine/test_step_target.py"),
    "engine/scheduling/policy.py": ("engine/test_policy.py",),
    "engine/scheduling/step_time.py": ("engine/test_step_time.py", "engine/test_step_target.py"),
    "engine/step/": (*SCHEDULE, "engine/test_logprobs.py", "engine/test_beam_search.py", "engine/test_failed_steps.py"),
    "engine/step/containment.py": ("engine/test_containment.py",),
    "kv/": ("kv", *SCHEDULE),
    "runner/sampling/": ("sampling",),
    "runner/sampling/random.py": ("sampling/test_random.py",),
    "server/": ("server/test_config.py", "server/test_endpoints.py", *REQUESTS),
    "server/api/": (*REQUESTS, "server/test_messages_translation.py", "server/test_responses_translation.py"),
    "server/api/messages/": ("server/test_messages_translation.py", "server/test_messages.py"),
    "server/api/responses/": ("server/test_responses_translation.py", "server/test_responses.py"),
    "server/api/shared/sampling.py": ("server/test_request_params.py",),
    "server/http/auth.py": ("server/test_auth.py",),
    "server/http/bodies.py": (
        "server/test_bodies.py",
        "server/test_bad_input.py::test_a_body_that_does_not_come_is_not_waited_for",
        "server/test_bad_input.py::test_half_a_body_of_a_client_that_has_gone_starts_nothing",
    ),
    "server/http/errors.py": ("server/test_errors.py", "server/test_auth.py"),
    "server/operations/admission.py": ("server/test_admission.py",),
}
"""by the beginning of a path under src/quire, the longest of which counts: paths under tests"""
