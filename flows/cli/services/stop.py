"""Stop a run that is at work: after the step that it is making, or now.

What is committed stays, and the step at work keeps what it has: the same command as before goes on there. After this step, the run also
makes an evaluation that is due, and writes its report and export as at its end.

ratchet stop mine
ratchet stop mine --now                                          in the middle of its step
ratchet stop mine && ratchet status
"""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from infra.processes.children import ProcessRef

Now = Annotated[bool, Parameter(help="End it in the middle of its step.", negative=())]
WAIT_S = 60.0
"""Seconds in which a process ends its programs and tells Prefect; then a second Ctrl-C ends it at once."""


def stop(run: str, /, *, now: Now = False) -> None:
    from flows.cli.terminal import console
    from infra.processes import children
    from infra.runs import run_state

    run_state.check_exists(run)
    owner = run_state.owner_at_work(run)
    if owner is None:
        raise ValueError(f"run {run!r} is not at work: there is nothing to stop")
    if not now:
        run_state.ask_to_stop(run)
        console.print(f"run {run} stops after the step that it is making; --now ends it in the middle")
        return
    end_process(owner.process)
    try:
        children.wait_until_gone(owner.process, WAIT_S)
    except children.ProgramTimedOut:
        end_process(owner.process)
        children.wait_until_gone(owner.process, WAIT_S)
    console.print(f"run {run} has stopped, {run_state.state_of(run).num_committed} of its steps are committed")


def end_process(process: "ProcessRef") -> None:
    """As its own terminal would: Ctrl-C; a flow run of our worker is cancelled, so that Prefect's page says so."""
    import os
    import signal

    from infra.processes import children
    from infra.services import flow_runs, servers

    worker, found = servers.living(servers.WORKER), flow_runs.of_process(process)
    if worker and found and children.of_program({process.pid}, worker.process.program):
        flow_runs.cancel(*found)
    else:
        os.kill(process.pid, signal.SIGINT)
