"""Show the end of a log: of a run's trainer, the engine, a server.

Without NAME the logs of this workspace are listed. NAME is a run, `engine`, `trainer`, or one of the listed names. The engine's second
replica is `engine-1`.

ratchet logs                                                     which logs there are
ratchet logs engine -n 100
ratchet logs mine --step 3 --follow                              the trainer in step 3 of the run `mine`
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Name = Annotated[str | None, Parameter(help="A run, engine, trainer, prefect, worker, mlflow, ...", show_default=False)]
Step = Annotated[int | None, Parameter(help="Step of the run; left out, the latest.", show_default=False)]
Lines = Annotated[int, Parameter(name=("--lines", "-n"), help="Number of lines from the end.")]
Follow = Annotated[bool, Parameter(name=("--follow", "-f"), help="Go on with what is added, until Ctrl-C.", negative=())]
POLL_S = 0.5


def logs(name: Name = None, /, *, step: Step = None, lines: Lines = 40, follow: Follow = False) -> None:
    if lines < 0:
        raise ValueError(f"--lines {lines} is no number of lines: give 0 or more")
    from infra.processes import logs

    if name is None:
        print_list()
        return
    path = log_of(name, step)
    print(logs.last_lines(path, lines), flush=True)
    if follow:
        follow_on(path)


def log_of(name: str, step: int | None) -> Path:
    """The log file of a program or of a run's training.

    Raises:
        ValueError: where there is none; lists the names that are known.
    """
    from infra import engines
    from infra.config.tools.overrides import nearest
    from infra.runs import run_state
    from infra.store.layout import RunFolder, StepFolder, Workspace, run_folder
    from infra.trainers import resident

    folder = Workspace.here().logs
    for engine in engines.recorded():
        if name == (f"engine-{engine.replica}" if engine.replica else "engine"):
            return engine.log_path
    if name == "trainer" and (trainer := resident.recorded()):
        return trainer.log_path
    if run_folder(name).is_dir():
        steps = sorted(path for path in RunFolder.of(name).steps.glob("*") if StepFolder(path).train.log.exists())
        wanted = [StepFolder(path).train.log for path in steps[-1:]] if step is None else [StepFolder.at(name, step).train.log]
        if wanted and wanted[0].exists():
            return wanted[0]
        raise ValueError(
            f"run {name!r} has no trainer log{'' if step is None else f' of step {step}'} yet; `ratchet logs` lists the other logs"
        )
    if (folder / f"{name}.log").exists():
        return folder / f"{name}.log"
    known = [*run_state.known_runs(), *(path.stem for path in folder.glob("*.log"))]
    raise ValueError(f"there is no log of {name!r}{nearest(name, known)}; `ratchet logs` lists them")


def print_list() -> None:
    import time

    from rich.table import Table

    from flows.cli.terminal import console
    from infra.store.layout import Workspace

    table, folder = Table(), Workspace.here().logs
    for column in ("log", "KiB", "last line, minutes ago"):
        table.add_column(column, justify="left" if column == "log" else "right")
    found = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for path in found:
        about = path.stat()
        table.add_row(path.stem, f"{about.st_size / 1024:.0f}", f"{(time.time() - about.st_mtime) / 60:.0f}")
    if found:
        console.print(table)
    else:
        console.print(f"no log in {folder} yet")


def follow_on(path: Path) -> None:
    """Print what is added to a log; ends with Ctrl-C, which is how one leaves here."""
    import time
    from contextlib import suppress

    with suppress(KeyboardInterrupt), path.open(errors="replace") as stream:
        stream.seek(0, 2)
        while True:
            if found := stream.read():
                print(found, end="", flush=True)
            time.sleep(POLL_S)
