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
    from flows.cli.endings import print_table
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
        columns = ("run", "steps", "last reward", "best evaluation", "state")
        print_table(f"workspace {settings().workspace}", columns, [row_of(each) for each in found])
    for line in unreadable:
        console.print(line, soft_wrap=True)
    if not found and not unreadable and not as_json:
        console.print(
            f"workspace {settings().workspace} has no run yet: `ratchet quickstart` makes the first step of one", soft_wrap=True
        )


def list_stored(store: str, *, as_json: bool) -> None:
    from flows.cli.endings import print_table
    from flows.cli.terminal import console
    from infra.mirror.fetching import stored_runs

    found = stored_runs(store)
    if as_json:
        import json

        print(json.dumps([each._asdict() for each in found], indent=1))
    else:
        sound = [each for each in found if not each.trouble]
        if not found:
            console.print(f"{store} holds no run")
        elif sound:
            columns = ("run", "steps", "last reward", "to continue it")
            print_table(f"store {store}", columns, [row_of_stored(each) for each in sound])
        for each in found:
            if each.trouble:
                console.print(f"run {each.name} cannot be continued: {each.trouble}", soft_wrap=True)


def row_of_stored(each: "StoredRun") -> tuple[str, str, str, str]:
    reward = "-" if each.last_reward is None else f"{each.last_reward:.4g}"
    return each.name, str(each.num_steps), reward, f"ratchet run --from {each.url}"


def row_of(each: "RunState") -> tuple[str, str, str, str, str]:
    reward = "-" if each.last_reward is None else f"{each.last_reward:.4g}"
    best = "-" if each.best_score is None else f"{each.best_score:.3f} (adapter {each.best_version})"
    return each.name, f"{each.num_committed}/{each.num_steps}", reward, best, each.state
