"""Which test files take long: they start engines, trainers or servers. `./infra/test quick` leaves them out."""

SLOW_FOLDERS = ("flows", "drills")
SLOW_FILES = (
    "infra/comparison/test_rules.py",
    "infra/config/test_engine_flags.py",
    "infra/data/test_arithmetic.py",
    "infra/engines/server/test_merged_weights.py",
    "infra/engines/test_conformance.py",
    "infra/engines/test_sglang.py",
    "infra/engines/test_vllm.py",
    "infra/gateway/test_real_engine.py",
    "infra/gateway/test_renderers.py",
    "infra/megatron/checkpoint/test_adapter_state.py",
    "infra/megatron/model/test_lazy_compile.py",
    "infra/megatron/test_layouts.py",
    "infra/megatron/test_left_behind.py",
    "infra/megatron/test_nodes.py",
    "infra/megatron/test_program.py",
    "infra/megatron/test_resident.py",
    "infra/megatron/test_sockets.py",
    "infra/megatron/test_steps.py",
    "infra/processes/test_children.py",
    "infra/processes/test_gpu_lock.py",
    "infra/runs/test_lineage.py",
    "infra/services/test_servers.py",
    "infra/tiny_model/test_tiny_model.py",
    "infra/tracking/test_mlflow_address.py",
    "infra/tracking/test_mlflow_store.py",
    "infra/tracking/test_tables.py",
    "infra/tracking/test_upload.py",
    "tasks/replays/test_begin_replay.py",
    "tasks/support/test_flow_runs.py",
    "tasks/support/test_prefect_calls.py",
    "tasks/support/test_progress_artifacts.py",
    "tasks/support/test_retries.py",
    "test_compare_engines_notebook.py",
    "test_end_to_end.py",
    "test_gpu_scripts.py",
    "test_partial_end_to_end.py",
)
"""8 s or more on 2 cores, by `./infra/test --durations=0`."""


def is_slow(path: str) -> bool:
    """path: Of a test file, relative to this folder."""
    return path.split("/")[0] in SLOW_FOLDERS or path in SLOW_FILES
