"""Paths of a comparison: its state in the workspace, and the files for people in its output folder.

<workspace>/comparisons/<digest>/{config.json, adapters/000001/, batches/000000.safetensors, trained/...}
                                /blocks/00-vllm/{start.json, steps/000000.json, server.log}
<output>/{benchmark_report.txt, benchmark_report.md, benchmark_combined.json, vllm_metrics.json, sglang_metrics.json, logs/, charts/}
"""

import os
from pathlib import Path

from infra.comparison.config import Backend, Block, ComparisonConfig
from infra.settings import Settings, settings
from infra.store.files import folder_of_user
from infra.store.layout import Workspace


def state_folder(digest: str) -> Path:
    return Workspace.here().comparisons / digest


def block_folder(digest: str, block: Block) -> Path:
    return state_folder(digest) / "blocks" / block.name


def step_path(digest: str, block: Block, step: int) -> Path:
    return block_folder(digest, block) / "steps" / f"{step:06d}.json"


def adapter_folder(digest: str, version: int) -> Path:
    return state_folder(digest) / "adapters" / f"{version:06d}"


def output_folder(config: ComparisonConfig) -> Path:
    return folder_of_user("output", config.output)


def machine_for(config: ComparisonConfig, backend: Backend) -> Settings:
    """Return the settings of this machine with the options of one engine in them: its port, its interpreter."""
    changes: dict[str, object] = {"engine_port": config.port(backend)}
    if config.python(backend) != "auto":
        changes[f"{backend}_python"] = Path(os.path.expanduser(config.python(backend))).absolute()
    return Settings.model_validate(dict(settings()) | changes)
