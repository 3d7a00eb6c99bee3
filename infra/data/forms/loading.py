"""Load the tables of a data set: from a local file or folder, or from the hub through `datasets`."""

import os
from contextlib import nullcontext
from pathlib import Path

from infra.config import DataConfig
from infra.config.sections.environments.taskset import taskset_of
from infra.data.forms import tasksets
from infra.data.forms.local_files import Table, read_tables
from infra.models import hub
from infra.progress import work as progress


def load(config: DataConfig) -> list[Table]:
    """Raises ValueError for a source that does not exist or cannot be read."""
    if (taskset := taskset_of(config.source)) is not None:
        return [tasksets.table_of(taskset)]
    path = Path(os.path.expanduser(config.source))
    if config.source and path.exists():
        return read_tables(path / config.subset if path.is_dir() and config.subset else path, config.split)
    if config.source.startswith((".", "/", "~")) or config.source.count("/") != 1:
        raise ValueError(
            f"data set {config.source!r} does not exist; give a local file or folder, a hub id such as openai/gsm8k, verifiers:ID, or "
            "'arithmetic'"
        )
    return [_from_hub(config)]


def _from_hub(config: DataConfig) -> Table:
    import datasets

    trouble = hub.trouble()
    try:
        with (
            progress.work(f"fetching the data set {config.source}", has_bar=True),
            hub.only_downloaded() if trouble else nullcontext(),
        ):
            found = datasets.load_dataset(config.source, config.subset, split=config.split, revision=config.revision)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        at = f", revision {config.revision!r}," if config.revision else ""
        why = (
            f"{trouble}, and no earlier download of it is here: give a local file, or try again with a network"
            if trouble
            else error
        )
        raise ValueError(f"data set {config.source!r}{at} is neither a local path nor to be had from the hub: {why}") from error
    columns = found.with_format("arrow")[:].to_pydict()  # images stay undecoded
    return Table(f"data set {config.source!r}, split {config.split!r}", columns)
