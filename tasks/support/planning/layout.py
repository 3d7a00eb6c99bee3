"""The layout of a run on this machine: planned when it begins, kept when it goes on; and the forecast of its steps."""

import logging

import psutil

from infra.colocation.trainer_memory import model_in
from infra.config import RunConfig
from infra.config.tools.changes import check_goes_on
from infra.forecast import remembered
from infra.forecast.step_forecast import FIRST_COMPARED, StepForecast
from infra.machine import devices, nvml
from infra.models import base_model
from infra.runs import history, lineage, run_state
from infra.runs.manifest import read_manifest
from infra.settings import settings
from infra.simulation import run_plan
from infra.simulation.run_plan import Host, PlannedLayout
from infra.store.files import open_workspace, read_note, write_json
from infra.store.layout import RunFolder, step_folder_of
from tasks.rewards import by_reward_model
from tasks.support.progress_artifacts import progress_artifacts

log = logging.getLogger(__name__)


def laid_out(config: RunConfig) -> tuple[RunConfig, PlannedLayout | None]:
    """The configuration with the layout of the run, and the plan where it was made just now.

    Nothing changes on a CPU, on one GPU, over several nodes, with another engine than SGLang, with a second model on the GPUs, or with layout
    `by_hand`.

    Raises:
        ValueError: if no layout fits, in one line.
    """
    if config.layout == "by_hand" or not _is_planned(config) or devices.num_gpus() < 2:
        return config, None
    if (begun := _as_begun(config)) is not None:
        return begun, None
    host = this_host()
    if host is None:
        log.warning("layout auto: %s is no GPU that the plan knows; the layout stays as it is set", devices.processor())
        return config, None
    open_workspace()
    with progress_artifacts():  # the model may have to be downloaded
        model = model_in(base_model.locate(config.model))
    found, layout = run_plan.plan_run(config, host, model)
    log.info("%s", "\n".join(layout.lines))
    return found, layout


def _is_planned(config: RunConfig) -> bool:
    """Whether the plan knows all programs that would share the GPUs."""
    has_second_model = config.reward.has_judge_server or by_reward_model.takes_gpu(config.reward)
    return config.engine.kind == "sglang" and settings().cluster_address is None and not has_second_model


def this_host() -> Host | None:
    """This machine; None where the plan does not know its GPUs, or they are unequal."""
    gpus = nvml.read().gpus
    kinds = {run_plan.kind_of(nvml.name(gpu.number), gpu.total_bytes) for gpu in gpus}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        return None
    lists = settings().engine_gpus, settings().trainer_gpus
    own = (len(lists[0]), len(lists[1])) if settings().is_split else None
    return Host(len(lists[0]) or len(gpus), kind, psutil.virtual_memory().total, own)


def _as_begun(config: RunConfig) -> RunConfig | None:
    """The configuration with the layout that its run has already; None for a run that begins, or begins again as another one."""
    if config.name not in run_state.known_runs():
        return None
    found = run_plan.kept(config, run_state.config_of(config.name))
    try:
        check_goes_on(run_state.config_of(config.name), found)
    except ValueError:
        return None  # the check of the run says what differs, or it begins again
    return found


def note_plan(config: RunConfig, layout: PlannedLayout | None) -> None:
    """Write what was planned beside the run's configuration, and the forecast of its steps, if it has made none yet.

    layout: As planned just now; None: the run's fields are as they were set.
    """
    folder = RunFolder.of(config.name)
    if layout is not None:
        write_json(folder.layout, layout.model_dump(mode="json"))
    if lineage.committed_steps(config.name) or (layout is None and folder.forecast.exists()):
        return
    found = layout.forecast if layout else _forecast(config)
    if found is not None:
        write_json(folder.forecast, found.model_dump(mode="json"))
        log.info("forecast (%s): %s", found.source, ", ".join(f"{name} {value:.3g}" for name, value in found.parts.items()))


def _forecast(config: RunConfig) -> StepForecast | None:
    model, host = model_in(base_model.locate(config.model)), this_host()
    if host is not None and _is_planned(config):
        return run_plan.forecast_on(config, host, model)
    return run_plan.forecast_by_measured(config, model)


def words_of(run: str) -> str:
    """The layout that was planned for a run, in one line; empty where none was."""
    found = read_note(RunFolder.of(run).layout, PlannedLayout)
    return found.words if found else ""


def remember_rates(config: RunConfig, num_committed: int) -> None:
    """Keep what this run's steps measured, for the next plan on this machine."""
    alike = range(_first_alike(config, num_committed), num_committed)
    steps = [figures for step in alike if (figures := history.figures_at(config.name, step)) is not None]
    if len(steps) > FIRST_COMPARED:
        remembered.remember(config, model_in(base_model.locate(config.model)), steps)


def _first_alike(config: RunConfig, num_committed: int) -> int:
    """The first of a run's latest steps that were made in its present layout and on this processor: both may change in a run, and rates are
    remembered by them."""
    layout, processor = remembered.layout_key(config.engine, config.trainer), devices.processor()
    for step in reversed(range(lineage.first_step(config.name), num_committed)):
        try:
            made = read_manifest(step_folder_of(config.name, step))
        except ValueError:  # of another version of Ratchet
            return step + 1
        if remembered.layout_key(made.config.engine, made.config.trainer) != layout or made.machine.get("processor") != processor:
            return step + 1
    return lineage.first_step(config.name)
