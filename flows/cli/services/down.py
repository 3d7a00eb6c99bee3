"""End the servers, the engine, the trainer and the upload that this workspace has started, and nothing else.

A run that is at work in this workspace fails when its engine goes: `ratchet stop RUN` ends it first. With --purge the workspace and
the environments of this checkout are removed afterwards: all runs, models and stores. It asks first.

ratchet down
ratchet stop mine && ratchet down
ratchet down --purge                                             as a fresh clone; sizes are shown, and it asks
"""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from pathlib import Path

Purge = Annotated[bool, Parameter(help="Then remove the workspace and this checkout's environments.", negative=())]
Yes = Annotated[bool, Parameter(name=("--yes", "-y"), help="With --purge: do not ask.", negative=())]


def down(*, purge: Purge = False, yes: Yes = False) -> None:
    from flows.cli.services import servers
    from flows.cli.terminal import log_to_terminal

    log_to_terminal()
    doomed = made_here() if purge else []
    servers.stop()
    if purge:
        remove(doomed, yes)


def made_here() -> "list[Path]":
    """The workspace and the environments of this checkout; the one that this program runs in is the last.

    Raises:
        ValueError: if a run is at work, or the workspace's folder is not one of ours.
    """
    import sys
    from pathlib import Path

    from infra.processes import gpu_lock
    from infra.settings import CHECKOUT, settings
    from infra.store.layout import Workspace

    workspace = settings().workspace
    owner = gpu_lock.holder()
    if owner and owner.workspace == workspace:
        raise ValueError(f"{owner.who} is at work, {owner}: end it first, a run by `ratchet stop RUN --now`")
    if workspace.exists() and not Workspace(workspace).layout_version.exists():
        raise ValueError(
            f"{workspace} holds no workspace of Ratchet, and nothing is removed: RATCHET_WORKSPACE names another folder"
        )
    environments = [path for path in CHECKOUT.glob(".venv*") if (path / "pyvenv.cfg").exists() and not path.is_symlink()]
    found = [path for path in (workspace, *environments) if path.exists()]
    return sorted(found, key=lambda path: path == Path(sys.prefix))


def remove(folders: "list[Path]", without_question: bool) -> None:
    """Show folders with their sizes, ask, and remove them."""
    import shutil

    from flows.cli.session import is_confirmed
    from flows.cli.terminal import console
    from infra.store import disk_usage

    for folder in folders:
        console.print(f"{disk_usage.shown(disk_usage.num_bytes(folder)):>12}  {folder}", soft_wrap=True)
    if not is_confirmed("Remove all of it, with every run and model?", "removing what was made here", without_question):
        return
    console.print("removed; `./infra/quickstart` makes everything again")
    for folder in folders:
        shutil.rmtree(folder)
