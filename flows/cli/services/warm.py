"""Start the engine of a configuration once and end it, so that a run's start finds its kernels compiled."""

from functools import partial

from infra.config import RunConfig


def chosen(name: str) -> RunConfig:
    """Return a preset, or the configuration in a file. Raises ValueError if there is none of this name."""
    from pathlib import Path

    from flows.cli.fields import Chosen

    is_file = Path(name).is_file()
    config, _ = Chosen(preset=None if is_file else name, file=Path(name) if is_file else None, changes=()).run(name)
    return config


def warm(config: RunConfig) -> str:
    """Start the engine with the base model, its checks included, and end it; return a line on what that took. An engine that already runs
    with this model and these flags is left alone.

    Raises:
        ValueError: for a configuration that cannot work on this machine.
        EngineUnavailable: if it does not start.
    """
    from infra.colocation.plans import resolve_colocation
    from infra.engines import open_engine
    from infra.processes.gpu_lock import gpu_lock
    from infra.runs.lineage import base_version
    from tasks.support.planning.layout import laid_out
    from tasks.support.preflight import check

    config, _ = laid_out(config)
    with gpu_lock("ratchet up --warm", preflight=partial(check, config, ("wake_engine",))):
        adapter = base_version(config)
        engine = open_engine(resolve_colocation(config).engine, adapter)
        try:
            engine.wake()
            engine.load_adapter(adapter)
            figures = engine.start_figures()
        except BaseException:
            engine.stop()
            raise
        if not figures:
            return "runs already, or compiles nothing"
        engine.stop()
        return f"started in {figures['s']:.0f} s, compiled {figures['compiled_files']:.0f} files, ended; they are kept in the workspace"
