"""Open a run at its next step, after everything that can be found wrong beforehand was looked for."""

import logging
import time
from pathlib import Path

from prefect import task

from infra import base_model, dataset, devices, files
from infra.config import ATTENTION, RunConfig, TrainerConfig
from infra.files import MANIFEST, open_workspace, read_json, run_folder, step_folder, write_json
from infra.megatron.architecture import Architecture, layout_problem, read_architecture
from infra.records import AdapterVersion, Step, StepReport
from infra.settings import settings
from tasks import rewards
from tasks.caching import NO_CACHE

log = logging.getLogger(__name__)

BEGAN = "began.json"
"""When the latest attempt at a step began, in seconds since the epoch."""
FIXED = ("model", "seed")
"""What a run may not change: adapters, optimizer state and the order of prompts hang on it."""


def check(config: RunConfig) -> None:
    """Raises ValueError with one clear line for the first thing that cannot work."""
    open_workspace()
    rewards.find(config.reward.name)
    devices.plan(config.engine)
    if config.engine.kind == "sglang" and not settings().sglang_python.exists():
        raise ValueError(
            f"SGLang's interpreter {settings().sglang_python} does not exist: run ./infra/quickstart, or set RATCHET_SGLANG_PYTHON"
        )
    dataset.rows(config.data)
    folder = base_model.locate(config.model)
    base_model.check_supported(folder)
    _check_context(config, folder)
    architecture = read_architecture(folder)
    _check_layout(config.trainer, architecture)
    _check_served_targets(config, architecture)


def _check_context(config: RunConfig, folder: Path) -> None:
    positions = base_model.num_positions(folder)
    if config.engine.max_context_tokens > positions:
        raise ValueError(
            f"engine.max_context_tokens {config.engine.max_context_tokens} is more than the {positions} positions of model {config.model!r}"
        )


def _check_served_targets(config: RunConfig, architecture: Architecture) -> None:
    on_experts = sorted(set(config.trainer.lora.target_modules) - set(ATTENTION))
    if architecture.experts and on_experts and config.engine.kind == "sglang" and devices.device() == "cpu":
        raise ValueError(
            f"trainer.lora.target_modules {', '.join(on_experts)} of a mixture of experts cannot be served by SGLang on a CPU: "
            f"choose from {', '.join(ATTENTION)}"
        )


def _check_layout(trainer: TrainerConfig, architecture: Architecture) -> None:
    problem = layout_problem(
        architecture,
        num_processes=trainer.num_processes,
        tensor_parallel=trainer.tensor_parallel,
        expert_parallel=trainer.expert_parallel,
        sequence_parallel=trainer.sequence_parallel,
    )
    if problem:
        raise ValueError(f"trainer: {problem}")


def open_run(config: RunConfig) -> None:
    """Create the run's folder, or make sure that this configuration may go on with it."""
    path = run_folder(config.name) / "config.json"
    if not path.exists():
        files.new_run_id(config.name)
        write_json(path, config.model_dump(mode="json"))
        return
    before = RunConfig.model_validate(read_json(path))
    for name, was, now in (
        *((field, getattr(before, field), getattr(config, field)) for field in FIXED),
        ("trainer.lora", before.trainer.lora, config.trainer.lora),
    ):
        if was != now:
            raise ValueError(
                f"run {config.name!r} was begun with {name} = {was!r} and cannot go on with {now!r}: give the new run another name"
            )


def next_step(run: str) -> int:
    """The first step that is not committed."""
    steps = run_folder(run) / "steps"
    return sum((folder / MANIFEST).exists() for folder in steps.glob("[0-9]*")) if steps.exists() else 0


def adapter_at(config: RunConfig, step: int) -> AdapterVersion:
    """The adapter that a step starts from."""
    if step > 0:
        report = step_folder(Step(run=config.name, index=step - 1, seed=config.seed)) / "report.json"
        return StepReport.model_validate(read_json(report)).adapter
    lora = config.trainer.lora
    base = base_model.reference(config.model)
    return AdapterVersion(
        run=config.name,
        version=0,
        base=base,
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        seed=config.seed,
    )


@task(cache_policy=NO_CACHE)
def begin_step(config: RunConfig, step: int | None) -> tuple[Step, AdapterVersion]:
    """RunConfig -> the step to make, and the adapter that it starts from.

    step: None is the run's next one; a number must be that one.

    Raises:
        ValueError: for a configuration that cannot work, or a step that is not the next.
    """
    check(config)
    open_run(config)
    following = next_step(config.name)
    if step not in (None, following):
        raise ValueError(
            f"step {step} of run {config.name!r} cannot be made now: {following} steps are committed, the next is {following}"
        )
    begun = Step(run=config.name, index=following, seed=config.seed)
    write_json(step_folder(begun) / "config.json", config.model_dump(mode="json"))
    write_json(step_folder(begun) / BEGAN, {"at": time.time()})
    log.info("run %s, step %d, in %s", begun.run, begun.index, step_folder(begun))
    return begun, adapter_at(config, following)
