"""Find the adapter to evaluate."""

import os
from pathlib import Path

from prefect import task

from infra.config import RunConfig
from infra.records import AdapterVersion
from infra.runs import evaluations, external_adapter
from infra.runs.lineage import adapter_at, next_step
from infra.runs.opening import check_base
from infra.runs.run_state import config_of, known_runs
from infra.store.files import verified_adapter
from tasks.support.caching import NO_CACHE
from tasks.support.preflight import open_run

OF_THE_RUN = ("best", "latest")
"""Names of versions; a folder of such a name is written ./best."""


def named_version(config: RunConfig, name: str) -> AdapterVersion:
    """Return the adapter version of a run by name: best (by its evaluations, else the latest), latest, or its number.

    Raises:
        ValueError: for a version that the run does not have.
    """
    latest = next_step(config.name)
    if name == "best":
        best = evaluations.best_of(config.evaluation, evaluations.of_run(config.name, config.eval_config))
        return adapter_at(config, best.step if best else latest)
    if name != "latest" and not (name.isdecimal() and int(name) <= latest):
        raise ValueError(
            f"run {config.name!r} has the adapter versions best, latest, and 0 (the base model) to {latest}, not {name!r}"
        )
    return adapter_at(config, latest if name == "latest" else int(name))


def check_adapter(config: RunConfig, adapter: int | str | None) -> None:
    """Check the name of an adapter, without reading its weights.

    adapter: As find_adapter takes it.

    Raises:
        ValueError: for a version that the run does not have, and for a folder that is neither.
    """
    latest = next_step(config.name)
    if adapter in OF_THE_RUN:
        return
    if isinstance(adapter, str) and not adapter.isdecimal():
        run, _, version = adapter.rpartition(":")
        if is_folder(adapter):
            external_adapter.check(config, _folder_of(adapter))
        elif run in known_runs():
            named_version(config_of(run), version)
        else:
            raise ValueError(f"adapter {adapter!r} is neither a version of the run, nor a folder, nor RUN:VERSION of another run")
    elif adapter is not None and not 0 <= int(adapter) <= latest:
        raise ValueError(f"run {config.name!r} has the adapter versions 0 (the base model) to {latest}, not {int(adapter)}")


def is_folder(adapter: int | str | None) -> bool:
    """Whether an adapter is given as a folder, whose check needs the base model."""
    return (
        isinstance(adapter, str) and adapter not in ("", *OF_THE_RUN) and not adapter.isdecimal() and _folder_of(adapter).is_dir()
    )


def _folder_of(adapter: str) -> Path:
    return Path(os.path.expanduser(adapter)).absolute()


@task(cache_policy=NO_CACHE)
def find_adapter(config: RunConfig, adapter: int | str | None) -> AdapterVersion:
    """A version of the run, or a folder -> AdapterVersion.

    adapter: A version (0 is the base model), best (by the run's own evaluations) or latest, None for the latest, the path of a PEFT folder or
        of a whole Hugging Face model, or RUN:VERSION of another run.

    Raises:
        ValueError: for a version that the run does not have, a folder that is neither, a configuration that is not the run's, or a base model
            that has changed.
    """
    check_adapter(config, adapter)
    if isinstance(adapter, str) and adapter in OF_THE_RUN:  # by the configuration of the run: this one may ask other questions
        adapter = named_version(config_of(config.name) if config.name in known_runs() else config, adapter).version
    if isinstance(adapter, str) and not adapter.isdecimal():
        return _by_name(config, adapter)
    open_run(_as_begun(config))
    check_base(config.model, adapter_at(config, next_step(config.name)))
    found = adapter_at(config, next_step(config.name) if adapter is None else int(adapter))
    if found.weights:
        verified_adapter(found)
    return found


def _by_name(config: RunConfig, adapter: str) -> AdapterVersion:
    folder = _folder_of(adapter)
    if folder.is_dir():
        return external_adapter.adopt(config, folder)
    run, _, version = adapter.rpartition(":")
    of_run = config_of(run)
    check_base(of_run.model, adapter_at(of_run, next_step(run)))
    found = named_version(of_run, version)
    if found.weights:
        verified_adapter(found)
    return found


def _as_begun(config: RunConfig) -> RunConfig:
    """The configuration with the evaluation that the run was begun with. Sets that ask no held-out rows may be put to any run's adapters: what it
    trains on does not depend on them then."""
    if config.name not in known_runs() or config.training.num_held_out:
        return config
    return config.but(evaluation=config_of(config.name).evaluation)
