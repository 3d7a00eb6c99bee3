"""Open a run at its next step, after everything that can be found wrong beforehand was looked for."""

import logging
import shutil
import time
from collections.abc import Container
from pathlib import Path
from typing import Literal

from prefect import task

from infra import engines
from infra.colocation import plans
from infra.concurrency import prefetch
from infra.config import ATTENTION, HandOver, RunConfig, TrainerConfig
from infra.config.tools.changes import check_goes_on
from infra.data import prompts
from infra.machine import devices, nvml
from infra.models import base_model
from infra.models.architecture import Architecture, layout_problem, read_architecture
from infra.records import AdapterVersion, Step
from infra.runs import lineage, replay
from infra.runs.manifest import read_manifest
from infra.runs.replay import TASKS
from infra.settings import settings
from infra.store import files
from infra.store.files import open_workspace, read_record, run_folder, step_folder, step_folder_of, write_json
from infra.tracking import mlflow_address
from infra.trainers import torchrun
from tasks import rewards
from tasks.rewards import own_answers
from tasks.support.caching import NO_CACHE
from tasks.support.progress_artifacts import watched

log = logging.getLogger(__name__)

CPU_MLP_MULTIPLE = 32
"""SGLang on a CPU pads an MLP's width to a multiple of it, times engine.tensor_parallel."""
KEPT_AT_A_NEW_BEGINNING = ("resolved.json", "mlflow_address.json")
"""What was written for the new beginning."""
BEGAN = "began.json"
"""When the latest attempt at a step began, in seconds since the epoch."""


def check(config: RunConfig, tasks: Container[str] = TASKS) -> None:
    """Raises ValueError with one clear line for the first thing that cannot work.

    tasks: those that are to run; what only others need may be missing.
    """
    open_workspace()
    mlflow_address.check(config.name)
    if "score" in tasks:
        rewards.find(config.reward.name)
    _check_age(config, plans.plan(config).hand_over)
    if "roll_out" in tasks:
        engines.check_config(config.engine, plans.plan(config).hand_over)
        _check_interpreter(config.engine.kind)
    with watched():  # both may have to be fetched
        if "draw_prompts" in tasks:
            own_answers.check_data_set(config.reward.name, config.training)
        folder = base_model.locate(config.model)
    base_model.check_supported(folder)
    if "draw_prompts" in tasks:
        prompts.check_lengths(config.training, folder)
        prompts.check_repeats(config.training, folder, num_steps=config.num_steps, seed=config.seed)
    _check_context(config, folder)
    architecture = read_architecture(folder)
    _check_layout(config.trainer, architecture)
    torchrun.check_nodes(config.trainer)
    _check_served_targets(config, architecture)
    _check_reload(config, architecture)
    _check_gpus(config)


def _check_gpus(config: RunConfig) -> None:
    """A program that is given fewer than it asks for would fail at its start, again and again."""
    if devices.device() == "cpu":
        return
    here = nvml.numbers()
    on_this_node = -(-config.trainer.num_processes // settings().trainer_nodes)
    for field, wanted, given, name in (
        ("engine.tensor_parallel", config.engine.tensor_parallel, settings().engine_gpus, "RATCHET_ENGINE_GPUS"),
        ("trainer.num_processes", on_this_node, settings().trainer_gpus, "RATCHET_TRAINER_GPUS"),
    ):
        if missing := set(given) - set(here):
            raise ValueError(f"{name} names GPU {min(missing)}; this process may use {', '.join(map(str, here))}")
        if wanted > len(given or here):
            raise ValueError(
                f"{field} asks for {wanted} GPUs of this machine, there are {len(given or here)}: lower it, or give it more"
            )


def _check_age(config: RunConfig, plan: HandOver) -> None:
    max_age, is_free = config.trainer.loss.correction.max_age, plan == "resident" and devices.device() == "cpu"
    if max_age and plan != "split" and not is_free:
        raise ValueError(
            f"trainer.loss.correction.max_age {max_age} has the engine sample while the trainer works, with hand-over plan {plan!r} they "
            "take turns: give each GPUs of its own (RATCHET_ENGINE_GPUS, RATCHET_TRAINER_GPUS), or set it to 0"
        )


def _check_interpreter(kind: str) -> None:
    makers = {
        "sglang": (settings().sglang_python, "SGLang", "./infra/quickstart"),
        "vllm": (settings().vllm_python, "vLLM", "python3 infra/setup/bootstrap.py --vllm"),
    }
    if kind in makers and not makers[kind][0].exists():
        python, name, command = makers[kind]
        raise ValueError(f"{name}'s interpreter {python} does not exist: run {command}, or set RATCHET_{kind.upper()}_PYTHON")


def _check_context(config: RunConfig, folder: Path) -> None:
    positions = base_model.num_positions(folder)
    if config.engine.max_context_tokens > positions:
        raise ValueError(
            f"engine.max_context_tokens {config.engine.max_context_tokens} is more than the {positions} positions of model {config.model!r}"
        )


def _check_served_targets(config: RunConfig, architecture: Architecture) -> None:
    is_beside = config.engine.kind == "sglang" and config.engine.serve == "adapter"
    if is_beside and devices.device() == "cpu" and not architecture.experts:
        _check_width_on_cpu(config, architecture)
    on_experts = sorted(set(config.trainer.lora.target_modules) - set(ATTENTION))
    if architecture.experts and on_experts and is_beside and devices.device() == "cpu":
        raise ValueError(
            f"trainer.lora.target_modules {', '.join(on_experts)} of a mixture of experts cannot be served by SGLang on a CPU: "
            f"choose from {', '.join(ATTENTION)}, or engine.serve 'merged'"
        )


def _check_width_on_cpu(config: RunConfig, architecture: Architecture) -> None:
    """SGLang pads the MLP of a model on a CPU, and not the adapter's matrices: its first request ends it (configs/update_config.py)."""
    on_mlp = sorted(set(config.trainer.lora.target_modules) - set(ATTENTION))
    multiple = CPU_MLP_MULTIPLE * config.engine.tensor_parallel
    if on_mlp and architecture.ffn_size % multiple:
        raise ValueError(
            f"intermediate_size {architecture.ffn_size} of model {config.model!r} is no multiple of {multiple}: SGLang on a CPU cannot serve an "
            f"adapter on {', '.join(on_mlp)}. Set trainer.lora.target_modules to {', '.join(ATTENTION)}, or engine.serve to 'merged'"
        )


def _check_reload(config: RunConfig, architecture: Architecture) -> None:
    lost = plans.passed_over(config.engine, config.trainer.lora, architecture)
    if config.engine.hand_over == "reload" and lost:
        raise ValueError(
            f"engine.hand_over 'reload' with trainer.lora.target_modules {', '.join(lost)} of a mixture of experts: SGLang does not read experts "
            f"again that carry adapters, and would answer without them. Choose 'offload', or target_modules from {', '.join(ATTENTION)}"
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


def open_run(config: RunConfig, *, nothing_committed: Literal["refuse", "begin again", "leave"] = "refuse") -> None:
    """Create the run's folder, or make sure that this configuration may go on with it. What the committed steps were made with decides.

    nothing_committed: What to do with a run of another configuration that has committed nothing. Only a process that has the turn may begin it
        again; one that will wait for the turn leaves it.
    """
    _open_config(config, nothing_committed)
    mlflow_address.note(config.name)


def _open_config(config: RunConfig, nothing_committed: str) -> None:
    path, made = run_folder(config.name) / "config.json", lineage.committed_steps(config.name)
    if made:
        check_goes_on(read_manifest(step_folder_of(config.name, made[-1])).config, config)
        if not path.exists():
            log.warning("%s is gone: it is written again from the manifest of step %d", path, made[0])
            write_json(path, read_manifest(step_folder_of(config.name, made[0])).config.model_dump(mode="json"))
        return
    if not path.exists():
        files.new_id(run_folder(config.name))
        write_json(path, config.model_dump(mode="json"))
        return
    cure = "remove it: the run has committed nothing and begins again"
    begun = read_record(path, RunConfig, cure=cure)
    if begun.name != config.name:
        raise ValueError(f"{path} is the configuration of run {begun.name!r}, not of {config.name!r}; {cure}")
    try:
        check_goes_on(begun, config)
    except ValueError as difference:
        if replay.origin_of(config.name) or nothing_committed == "refuse":
            raise
        if nothing_committed == "begin again":
            _begin_again(config, difference)


def _begin_again(config: RunConfig, difference: ValueError) -> None:
    """Nothing that was made with the old configuration can be used with the new one, and nothing of it was committed."""
    log.warning("run %s has committed nothing and is begun again, with another configuration: %s", config.name, difference)
    for path in run_folder(config.name).iterdir():
        if path.name not in KEPT_AT_A_NEW_BEGINNING:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    files.new_id(run_folder(config.name))
    write_json(run_folder(config.name) / "config.json", config.model_dump(mode="json"))


def adapter_at(config: RunConfig, step: int) -> AdapterVersion:
    """The adapter that a step starts from."""
    origin = replay.origin_of(config.name)
    if origin and step == origin.replayed_from.step:
        return origin.adapter
    if step > 0:
        return lineage.adapter_after(config.name, step - 1)
    return base_version(config)


def base_version(config: RunConfig) -> AdapterVersion:
    """Version 0: the base model, with what the first trained adapter will be like."""
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
    open_run(config, nothing_committed="begin again")
    following = lineage.next_step(config.name)
    if (origin := replay.origin_of(config.name)) and following == origin.replayed_from.step:
        raise ValueError(
            f"run {config.name!r} begins with a replay of step {following} of run {origin.replayed_from.run!r} that is not committed yet: "
            "run that replay again, it goes on where it ended"
        )
    if step not in (None, following):
        raise ValueError(
            f"step {step} of run {config.name!r} cannot be made now: {following} steps are committed, the next is {following}"
        )
    adapter = adapter_at(config, following)
    _check_base(config, adapter)
    return open_step(config, following), adapter


def _check_base(config: RunConfig, adapter: AdapterVersion) -> None:
    """Of a folder that was written over, or a hub model that moved, the adapters of before are no adapters."""
    if (found := base_model.reference(config.model).sha256) != adapter.base.sha256:
        raise ValueError(
            f"base model {config.model!r} is not what run {config.name!r} was begun with: the digest of its files is {found}, recorded was "
            f"{adapter.base.sha256}. Put the files back, or begin another run"
        )


def open_step(config: RunConfig, index: int) -> Step:
    """Write down what a step is made with, and when this attempt at it began: with its rollout, if that began early."""
    begun = Step(run=config.name, index=index, seed=config.seed)
    if not files.id_of(step_folder(begun)):
        files.new_id(step_folder(begun))
    write_json(step_folder(begun) / "config.json", config.model_dump(mode="json"))
    write_json(step_folder(begun) / BEGAN, {"at": prefetch.began_at(step_folder(begun)) or time.time()})
    log.info("run %s, step %d, in %s", begun.run, begun.index, step_folder(begun))
    return begun
