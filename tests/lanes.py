"""Which test files take long, as they start engines, trainers or servers, and the order of files. `./infra/test quick` leaves them out."""

from collections.abc import Sequence
from pathlib import Path

SLOW_FOLDERS = ("flows", "drills")
SLOW_FILES = (
    "infra/comparison/test_rules.py",
    "infra/config/test_engine_flags.py",
    "infra/data/test_arithmetic.py",
    "infra/data/test_chat_templates.py",
    "infra/engines/launchers/test_sglang_attention_patch.py",
    "infra/engines/replicas/test_replica_set.py",
    "infra/engines/server/test_merged_weights.py",
    "infra/engines/test_colocation.py",
    "infra/engines/test_conformance.py",
    "infra/engines/test_judge_server.py",
    "infra/engines/test_partial_rollouts.py",
    "infra/engines/test_sglang.py",
    "infra/engines/test_vllm.py",
    "infra/gateway/test_real_engine.py",
    "infra/gateway/test_renderers.py",
    "infra/megatron/checkpoint/test_adapter_state.py",
    "infra/megatron/checkpoint/test_stacked_experts.py",
    "infra/megatron/model/test_lazy_compile.py",
    "infra/megatron/test_layouts.py",
    "infra/megatron/test_left_behind.py",
    "infra/megatron/test_nodes.py",
    "infra/megatron/test_program.py",
    "infra/megatron/test_resident.py",
    "infra/megatron/test_routing_replay.py",
    "infra/megatron/test_shared_experts.py",
    "infra/megatron/test_shared_prompts.py",
    "infra/megatron/test_sockets.py",
    "infra/megatron/test_steps.py",
    "infra/megatron/test_turns.py",
    "infra/mirror/test_copying.py",
    "infra/mirror/test_under_way.py",
    "infra/processes/test_children.py",
    "infra/processes/test_gpu_lock.py",
    "infra/rewards/test_hostile.py",
    "infra/rewards/test_signatures.py",
    "infra/runs/foreign_adapters/test_judge_adapter.py",
    "infra/runs/test_lineage.py",
    "infra/runs/test_start_adapter.py",
    "infra/services/test_servers.py",
    "infra/store/test_odd_notes.py",
    "infra/tiny_model/test_tiny_model.py",
    "infra/tracking/test_mlflow_address.py",
    "infra/tracking/test_mlflow_store.py",
    "infra/tracking/test_tables.py",
    "infra/tracking/test_upload.py",
    "tasks/evaluations/test_evaluate_environment.py",
    "tasks/evaluations/test_inspect.py",
    "tasks/evaluations/test_inspect_real.py",
    "tasks/replays/test_begin_replay.py",
    "tasks/support/test_flow_runs.py",
    "tasks/support/test_prefect_calls.py",
    "tasks/support/test_progress_artifacts.py",
    "tasks/support/test_retries.py",
    "tasks/test_built_in_rewards.py",
    "tasks/test_carried_episodes.py",
    "tasks/test_draws_of_episodes.py",
    "tasks/test_episode_rollout.py",
    "tasks/test_judge.py",
    "tasks/test_judge_ahead.py",
    "tasks/test_mcp_rollout.py",
    "tasks/test_open_step.py",
    "tasks/test_oversampled_episodes.py",
    "tasks/test_reward_model.py",
    "tasks/test_scored_ahead.py",
    "tasks/test_snapshots.py",
    "tasks/test_taskset_faults.py",
    "tasks/test_taskset_rollout.py",
    "tasks/test_turns_of_their_own.py",
    "tasks/test_unjudged.py",
    "test_carried_end_to_end.py",
    "test_compare_engines_notebook.py",
    "test_end_to_end.py",
    "test_gpu_scripts.py",
    "test_judge_end_to_end.py",
    "test_oracle.py",
    "test_partial_end_to_end.py",
    "test_routing_replay_end_to_end.py",
)
"""8 s or more on 2 cores, by `./infra/test --durations=0`."""


def is_slow(path: str) -> bool:
    """path: Of a test file, relative to this folder."""
    return path.split("/")[0] in SLOW_FOLDERS or path in SLOW_FILES


def spread(end_to_end: Sequence[Path], slow: Sequence[Path]) -> list[Path]:
    """Slow files in the order in which workers take them, before all others: the short ones fill up what is left at the end.

    Two files with real engines at a time would wait for each other's threads on 2 cores, so they come evenly between the others.
    """
    places = [(place / len(files), path) for files in (end_to_end, slow) for place, path in enumerate(files)]
    return [path for _, path in sorted(places, key=lambda each: each[0])]
