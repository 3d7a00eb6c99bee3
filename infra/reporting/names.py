"""Names of a run's flow runs and reports, the same on all of Prefect's pages, and the tags to filter them by."""

from pathlib import PurePath

from infra.config import RunConfig


def step_name(run: str, step: int) -> str:
    return f"{run}/{step:06d}"


def evaluation_name(run: str, adapter: int | str) -> str:
    """adapter: A version of the run, or the path of a folder."""
    return f"{run}/eval/{adapter:06d}" if isinstance(adapter, int) else f"{run}/eval/{PurePath(adapter).name}"


def replay_name(run: str, step: int, original: str) -> str:
    return f"{step_name(run, step)} replays {original}"


def tags_of(config: RunConfig) -> list[str]:
    """Tags of a flow run: its model and its algorithm."""
    return [f"model:{PurePath(config.model).name}", f"algorithm:{config.batch.advantage}+{config.trainer.loss.kind}"]
