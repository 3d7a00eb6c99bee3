"""List the runs of this workspace: steps, last reward, best evaluation, state. With --store those of a store.

ratchet runs
ratchet runs --json                                              for programs
RATCHET_WORKSPACE=/data/other ratchet runs                       of another workspace
ratchet runs --store s3://bucket/runs                            copies, which `ratchet run --from` continues
"""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from infra.mirror.fetching import StoredRun
    from infra.runs.run_state import RunState

Json = Annotated[bool, Parameter(name="--json", help="Print JSON, one object a run.", negative=())]


Store = Annotated[
    str | None, Parameter(help="Address of a store, such as s3://bucket/runs or a folder.", metavar="URL", show_default=False)
]


def runs(*, as_json: Json = False, store: Store = None) -> None:
    from flows.cli.terminal import console
    from infra.runs import run_state
    from infra.settings import settings

    if store is not None:
        list_stored(store, as_json=as_json)
        return
    found, unreadable = [], []
    for name in run_state.known_runs():
        try:
            found.append(run_state.state_of(name))
        except ValueError as error:
            unreadable.append(f"run {name} cannot be read: {error}")
    if as_json:
        import json

        print(json.dumps([each._asdict() for each in found], indent=1))
    elif found:
        console.print(table_of(found))
    for line in unreadable:
        console.print(line, soft_wrap=True)
    if not found and not unreadable and not as_json:
        console.print(
            f"workspace {settings().workspace} has no run yet: `ratchet quickstart` makes the first step of one", soft_wrap=True
        )


def list_stored(store: str, *, as_json: bool) -> None:
    from flows.cli.terminal import console
    from infra.mirror.fetching import stored_runs

    found = stored_runs(store)
    if as_json:
        import json

        print(json.dumps([each._asdict() for each in found], indent=1))
    else:
        sound = [each for each in found if not each.trouble]
        if sound or not found:
            console.print(table_of_stored(sound) if sound else f"{store} holds no run")
        for each in found:
            if each.trouble:
                console.print(f"run {each.name} cannot be continued: {each.trouble}", soft_wrap=True)


def table_of_stored(found: "list[StoredRun]") -> object:
    from rich.table import Table

    table = Table()
    table.add_column("run", overflow="fold")
    for column in ("steps", "last reward"):
        table.add_column(column, justify="right")
    table.add_column("to continue it", overflow="fold")
    for each in found:
        reward = "-" if each.last_reward is None else f"{each.last_reward:.4g}"
        table.add_row(each.name, str(each.num_steps), reward, f"ratchet run --from {each.url}")
    return table


def table_of(found: "list[RunState]") -> object:
    from rich.table import Table

    table = Table()
    table.add_column("run", overflow="fold")
    for column in ("steps", "last reward", "best evaluation"):
        table.add_column(column, justify="right")
    table.add_column("state")
    for each in found:
        reward = "-" if each.last_reward is None else f"{each.last_reward:.4g}"
        best = "-" if each.best_score is None else f"{each.best_score:.3f} (adapter {each.best_version})"
        table.add_row(each.name, f"{each.num_committed}/{each.num_steps}", reward, best, each.state)
    return table
