"""Write an adapter of a run as a PEFT folder, or merged into its base model as a Hugging Face folder.

ratchet export mine                                              the best adapter, to the run's folder `export`
ratchet export mine --what merged --to /models/mine
ratchet export mine --adapter 5 --to /tmp/adapter-5
"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

Adapter = Annotated[str, Parameter(help="best (by the run's evaluations), latest, or a version.", metavar="best|latest|VERSION")]
What = Annotated[
    Literal["adapter", "merged"], Parameter(help="adapter: a PEFT folder; merged: besides, base model and adapter in one.")
]
To = Annotated[Path | None, Parameter(help="Folder to write to; left out, one in the run's folder.", metavar="FOLDER")]


def export(run: str, /, *, adapter: Adapter = "best", what: What = "adapter", to: To = None) -> None:
    from flows.cli import interrupts
    from flows.cli.endings import again
    from flows.cli.terminal import console, log_to_terminal
    from infra.config import ExportConfig
    from infra.runs.run_state import config_of
    from infra.store.files import folder_of_user
    from infra.store.layout import run_folder
    from tasks.evaluations.find_adapter import named_version
    from tasks.runs import finish_run

    log_to_terminal()
    config = config_of(run)
    found = named_version(config, adapter)
    if found.weights is None:
        raise ValueError(f"adapter {adapter} of run {run!r} is the base model {config.model} itself: there is nothing to export")
    default = run_folder(run) / ("export" if adapter in ("best", "latest") else f"export-{found.version:06d}")
    folder = folder_of_user("--to", to) if to else default
    finish_run.check_free(folder)
    interrupts.say(lambda: f"interrupted: adapter {found.version} was not exported whole; `{again()}` does it again")
    finish_run.export(ExportConfig(what=what), found, folder)
    for name in ("adapter", "merged") if what == "merged" else ("adapter",):
        console.print(f"adapter {found.version} of run {run}: {folder / name}", soft_wrap=True)
