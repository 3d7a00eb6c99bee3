"""The pre-flight check: find every detectable error of a configuration before a run, a step or an evaluation starts."""

import logging
import os
from collections.abc import Container
from pathlib import Path
from typing import Literal

from infra import engines
from infra.cluster import connection
from infra.colocation import plans
from infra.config import ATTENTION, ColocationPlan, EvalConfig, PlayedEnvironment, RunConfig, TrainerConfig
from infra.data import dataset, prompts
from infra.data.forms import tasksets
from infra.data.prompts import num_overlapping
from infra.environments import episodes
from infra.environments.inspect_tasks import running
from infra.gateway.rendering.admission import renderer_of
from infra.machine import devices, nvml
from infra.mirror import copying
from infra.mirror.ownership import check_is_ours
from infra.models import base_model, weights
from infra.models.architecture import Architecture, layout_problem, read_architecture, serving_problem
from infra.rewards.judges.ledger import set_aside_payments
from infra.runs import lineage, start_adapter
from infra.runs.foreign_adapters import judge_adapter
from infra.runs.opening import check_base, open_config
from infra.runs.replay import TASKS
from infra.settings import settings
from infra.store.files import open_workspace, run_id
from infra.store.layout import Workspace
from infra.tracking import mlflow_address
from infra.trainers import cluster
from tasks import rewards
from tasks.rewards import by_judge_server, by_model, by_reward_model, own_answers
from tasks.rewards.own_answers import check_own_answers
from tasks.support.episode_rollout import source_of
from tasks.support.progress_artifacts import progress_artifacts

log = logging.getLogger(__name__)

CPU_MLP_MULTIPLE = 32
"""SGLang on a CPU pads an MLP's width to a multiple of this number times engine.tensor_parallel."""


def check(config: RunConfig, tasks: Container[str] = TASKS) -> None:
    """The pre-flight check of a step: raises ValueError with one clear line for the first thing that cannot work.

    tasks: The tasks that will run. Requirements of other tasks are not checked.
    """
    open_workspace()
    mlflow_address.check(config.name)
    copying.check()
    if "score" in tasks and config.played is None:
        rewards.check(config.reward)
        by_judge_server.check_model(config.reward)
    if "roll_out" in tasks and config.played is not None:
        _check_environment(config.played)
    plan = plans.plan(config).colocation
    _check_age(config, plan)
    _check_draws(config, plan)
    if "roll_out" in tasks:
        engines.check_config(config.engine, plan)
        _check_interpreter(config.engine.kind)
    with progress_artifacts():  # model and data may have to be downloaded
        if "draw_prompts" in tasks:
            for function in () if config.played else config.reward.called:
                own_answers.check_data_set(function.name, config.training)
            if config.played is None:
                own_answers.check_there(config.reward, config.training)
            by_model.check_columns(config.reward, config.data.source, list(dataset.rows(config.training)[0].columns))
        folder = base_model.locate(config.model)
    base_model.check_supported(folder)
    architecture = read_architecture(folder)  # before the tokenizer, whose library reads config.json too but does not name it
    weights.check_base(folder, architecture)
    base_model.check_vocabulary(folder, architecture.vocab_size, ends=not config.sampling.ignore_eos)
    plans.check_quantization(config, architecture)
    start_adapter.check(config)
    if config.played is None:
        judge_adapter.check(config, config.reward)
    _check_context(config, folder)
    if config.played is not None:
        renderer_of(folder)
    if "draw_prompts" in tasks:
        prompts.check_lengths(config.training, folder)
        prompts.check_repeats(config.training, folder, num_steps=config.num_steps, seed=config.seed)
    _check_layout(config.trainer, architecture)
    _check_serving(config, architecture)
    if connection.is_set():
        connection.check_installed()
        connection.check_engine(config.engine)
        cluster.check_mode(config.trainer)
        connection.check_there()
    _check_served_targets(config, architecture)
    _check_reload(config, architecture)
    _check_gpus(config)
    plans.check_host(config)
    by_judge_server.check_turns(config)


def _check_environment(config: PlayedEnvironment) -> None:
    if config.name:
        form = "is no environment: give a file and its class or function such as mine.py:Game, or a dotted path such as my_module.Game"
        rewards.check_place(config.name, "environment", form)
    if config.id:
        tasksets.check(config.id)
    if missing := [name for name in config.variables if name not in os.environ]:
        raise ValueError(
            f"environment.environment or environment.mcp names {missing[0]!r}, which is not set where the flow runs: set it there, or leave it out"
        )
    episodes.check(config, source_of(config))


def _check_gpus(config: RunConfig) -> None:
    """Check the number of GPUs: a program that gets too few would fail at each start."""
    if devices.device() == "cpu":
        return
    here = nvml.numbers()
    # On a cluster ranks and engine servers are laid out over the nodes that live when they start.
    is_alone = not connection.is_set()
    for field, wanted, given, name in (
        (
            "engine.tensor_parallel",
            config.engine.tensor_parallel if is_alone else 1,
            settings().engine_gpus,
            "RATCHET_ENGINE_GPUS",
        ),
        (
            "trainer.num_processes",
            config.trainer.num_processes if is_alone else 1,
            settings().trainer_gpus,
            "RATCHET_TRAINER_GPUS",
        ),
    ):
        if missing := set(given) - set(here):
            raise ValueError(f"{name} names GPU {min(missing)}; this process may use {', '.join(map(str, here))}")
        if wanted > len(given or here):
            raise ValueError(
                f"{field} asks for {wanted} GPUs of this machine, there are {len(given or here)}: lower it, or give it more"
            )
    shared, share = devices.replicas_per_gpu(config.engine), config.engine.memory_fraction
    if config.engine.kind != "scripted" and shared > 1 and shared * share >= 1:
        raise ValueError(
            f"engine.replicas {config.engine.replicas} of {config.engine.tensor_parallel} GPUs on {len(settings().engine_gpus or here)}: {shared} "
            f"share a GPU, and each would take engine.memory_fraction {share:g} of it: set that below {1 / shared:.2f}, or take fewer replicas"
        )


def _check_age(config: RunConfig, plan: ColocationPlan) -> None:
    max_staleness, is_free = config.trainer.loss.correction.max_staleness, plan == "keep_weights" and devices.device() == "cpu"
    # On a cluster they cannot have GPUs of their own.
    cure = "" if connection.is_set() else "give each GPUs of its own (RATCHET_ENGINE_GPUS, RATCHET_TRAINER_GPUS), or "
    if max_staleness and plan != "separate_gpus" and not is_free:
        raise ValueError(
            f"trainer.loss.correction.max_staleness {max_staleness} has the engine sample while the trainer works, with colocation plan {plan!r} "
            f"they take turns: {cure}set it to 0"
        )


def _check_draws(config: RunConfig, plan: ColocationPlan) -> None:
    if config.data.max_draws > 1 and plan != "separate_gpus" and by_reward_model.takes_gpu(config.reward):
        raise ValueError(
            f"data.max_draws {config.data.max_draws} with the reward 'reward_model' on the engine's GPU: each draw would move both models. Set "
            "reward.model.device to 'cpu', max_draws to 1, or give engine and trainer GPUs of their own (RATCHET_ENGINE_GPUS, "
            "RATCHET_TRAINER_GPUS)"
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
    is_beside = config.engine.kind == "sglang" and config.engine.lora_mode == "adapter"
    if is_beside and devices.device() == "cpu" and not architecture.experts:
        _check_width_on_cpu(config, architecture)
    on_experts = sorted(set(config.trainer.lora.target_modules) - set(ATTENTION))
    if architecture.experts and on_experts and is_beside and devices.device() == "cpu":
        raise ValueError(
            f"trainer.lora.target_modules {', '.join(on_experts)} of a mixture of experts cannot be served by SGLang on a CPU: "
            f"choose from {', '.join(ATTENTION)}, or engine.lora_mode 'merged'"
        )


def _check_width_on_cpu(config: RunConfig, architecture: Architecture) -> None:
    """Check the MLP's width. On a CPU, SGLang pads the model's MLP, but not the adapter's matrices: its first request would end it
    (configs/update_config.py)."""
    on_mlp = sorted(set(config.trainer.lora.target_modules) - set(ATTENTION))
    multiple = CPU_MLP_MULTIPLE * config.engine.tensor_parallel
    if on_mlp and architecture.ffn_size % multiple:
        raise ValueError(
            f"intermediate_size {architecture.ffn_size} of model {config.model!r} is no multiple of {multiple}: SGLang on a CPU cannot serve an "
            f"adapter on {', '.join(on_mlp)}. Set trainer.lora.target_modules to {', '.join(ATTENTION)}, or engine.lora_mode to 'merged'"
        )


def _check_reload(config: RunConfig, architecture: Architecture) -> None:
    lost = plans.passed_over(config.engine, config.trainer.lora, architecture)
    if config.engine.colocation == "reload" and lost:
        raise ValueError(
            f"engine.colocation 'reload' with trainer.lora.target_modules {', '.join(lost)} of a mixture of experts: SGLang does not read experts "
            f"again that carry adapters, and would answer without them. Choose 'offload', or target_modules from {', '.join(ATTENTION)}"
        )


def _check_layout(trainer: TrainerConfig, architecture: Architecture) -> None:
    for name in ("routing_replay", "share_experts"):
        if getattr(trainer, name) and architecture.experts is None:
            raise ValueError(
                f"trainer.{name} true with a model of type {architecture.model_type!r}: it is no mixture of experts, set it to false"
            )
    if trainer.share_experts and settings().cluster_address:
        raise ValueError(
            "trainer.share_experts true on a cluster (RATCHET_CLUSTER_ADDRESS): engine and trainer share one GPU, set it to false"
        )
    problem = layout_problem(
        architecture,
        num_processes=trainer.num_processes,
        tensor_parallel=trainer.tensor_parallel,
        expert_parallel=trainer.expert_parallel,
        sequence_parallel=trainer.sequence_parallel,
    )
    if problem:
        raise ValueError(f"trainer: {problem}")


def _check_serving(config: RunConfig, architecture: Architecture) -> None:
    """On a CPU SGLang pads heads and widths, so any number does."""
    problem = serving_problem(architecture, config.engine.tensor_parallel)
    if problem and devices.device() == "cuda" and config.engine.kind != "scripted":
        raise ValueError(f"engine.tensor_parallel {config.engine.tensor_parallel} {problem}")


def open_run(config: RunConfig, *, nothing_committed: Literal["refuse", "begin again", "leave"] = "refuse") -> None:
    """Create the run's folder, or check that this configuration may continue it. The configuration of the committed steps decides.

    nothing_committed: What to do with a run of another configuration that has committed nothing. Only a process that holds the GPU lock may
        restart it. A process that still has to wait for the lock leaves it.
    """
    if not (before := run_id(config.name)):
        set_aside_payments(config.name)  # before there is a run: one that is interrupted here does it again
    open_config(config, nothing_committed)
    if before and run_id(config.name) != before:
        set_aside_payments(config.name)
    mlflow_address.note(config.name)


def check_run(config: RunConfig) -> None:
    """Check a run. Raises ValueError with one clear line for the first thing that cannot work; warns of held-out questions in the training data."""
    if config.evaluation.every:
        check_with_evaluation(config)
    else:
        check(config)
    _check_going_on(config)


def check_step(config: RunConfig) -> None:
    """Check a step as `check` does, and that no other machine makes its run."""
    check(config)
    _check_going_on(config)


def _check_going_on(config: RunConfig) -> None:
    """Check that no other machine makes a run that has steps, and that its base model is theirs."""
    check_is_ours(config.name)
    if step := lineage.next_step(config.name):
        adapter = lineage.adapter_at(config, step)
        if adapter.base.id == config.model:  # another one is a changed configuration, which says so itself
            check_base(config.model, adapter)


def check_with_evaluation(config: RunConfig) -> None:
    """Check a run as `check_run` does, and its evaluation in any case."""
    check(config)
    check_evaluation(config)


def check_evaluation(config: RunConfig) -> None:
    """Check the questions of all sets: log how many are held out of a single file, and warn of those in the training data.

    Raises:
        ValueError: for questions that cannot be asked.
    """
    for name, eval_config in config.eval_configs.items():
        try:
            _check_set(config, eval_config)
        except ValueError as error:
            of_set = f"evaluation set {name!r}" if name else "evaluation"
            raise ValueError(f"{of_set}: {error} (evaluation.every 0 is no evaluation)") from error
    if config.training.num_held_out:
        num_rows, num_held_out = len(dataset.rows(config.training)), len(dataset.held_out_rows(config.training))
        log.info(
            "%d of the %d rows of %s are held out for evaluations and never trained on (evaluation.num_prompts %d, a quarter at most)",
            *(num_held_out, num_rows, config.data.source, config.evaluation.num_prompts),
        )
    if contaminated := len(dataset.contaminated_rows(config.training)):
        log.warning(
            "%d of %d rows of data set %s are not trained on: the evaluation's data set has their text",
            *(contaminated, len(dataset.rows(config.training)), config.data.source),
        )


def _check_set(config: RunConfig, eval_config: EvalConfig) -> None:
    if eval_config.inspect:
        running.check(eval_config.inspect, Workspace.here().logs / running.CHECK_LOG)
        renderer_of(base_model.locate(config.model))
        return
    asked = prompts.held_out(eval_config.data, base_model.locate(config.model))
    rows = [(prompt.row_number, dataset.Row(prompt.question, prompt.answer, prompt.row)) for prompt in asked]
    if eval_config.environment is not None:
        if eval_config.environment != config.played:  # which the step's own check has seen
            _check_environment(eval_config.environment)
    elif eval_config.reward != config.reward or config.played is not None:
        rewards.check(eval_config.reward)
        judge_adapter.check(config, eval_config.reward)
    for function in () if eval_config.environment else eval_config.reward.called:
        check_own_answers(function.name, eval_config.data.source, rows)
    if eval_config.environment is None:
        own_answers.check_there(eval_config.reward, eval_config.data)
    if overlapping := num_overlapping(asked, eval_config.data, config.training):
        log.warning(
            "%d of the %d held-out questions%s are in the training set too: pass@1 will say too much (evaluation.split %r, data.split %r)",
            overlapping,
            len(asked),
            f" of set {eval_config.name!r}" if eval_config.name else "",
            eval_config.data.split,
            config.data.split,
        )
