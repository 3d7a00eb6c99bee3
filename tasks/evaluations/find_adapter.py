"""Find the adapter to evaluate."""

from pathlib import Path

from prefect import task

from infra.config import RunConfig
from infra.records import AdapterVersion
from infra.runs import evaluations, external_adapter
from infra.runs.lineage import adapter_at, next_step
from infra.runs.run_state import config_of, known_runs
from infra.store.files import verified_adapter
from tasks.support.caching import NO_CACHE
from tasks.support.preflight import open_run


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


@task(cache_policy=NO_CACHE)
def find_adapter(config: RunConfig, adapter: int | str | None) -> AdapterVersion:
    """A version of the run, or a folder -> AdapterVersion.

    adapter: A version (0 is the base model), None for the latest, the path of a PEFT folder or of a whole Hugging Face model, or RUN:VERSION of
        another run.

    Raises:
        ValueError: for a version that the run does not have, a folder that is neither, or a configuration that is not the run's.
    """
    if isinstance(adapter, str) and not adapter.isdecimal():
        return _by_name(config, adapter)
    open_run(_as_begun(config))
    latest = next_step(config.name)
    version = latest if adapter is None else int(adapter)
    if not 0 <= version <= latest:
        raise ValueError(f"run {config.name!r} has the adapter versions 0 (the base model) to {latest}, not {version}")
    found = adapter_at(config, version)
    if found.weights:
        verified_adapter(found)
    return found


def _by_name(config: RunConfig, adapter: str) -> AdapterVersion:
    folder = Path(adapter).expanduser().absolute()
    if folder.is_dir():
        return external_adapter.adopt(config, folder)
    run, _, version = adapter.rpartition(":")
    if run in known_runs():
        found = named_version(config_of(run), version)
        if found.weights:
            verified_adapter(found)
        return found
    raise ValueError(f"adapter {adapter!r} is neither a version of the run, nor a folder, nor RUN:VERSION of another run")


def _as_begun(config: RunConfig) -> RunConfig:
    """The configuration with the evaluation that the run was begun with. Sets that ask no held-out rows may be put to any run's adapters: what it
    trains on does not depend on them then."""
    if config.name not in known_runs() or config.training.num_held_out:
        return config
    return config.but(evaluation=config_of(config.name).evaluation)
