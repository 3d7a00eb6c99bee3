"""Replay a committed step as the first step of a new run.

What lies before the first task that runs again is taken from the step as it is; fields may be set for what is made again.

ratchet replay smoke 0 --name again                              training once more: the same digests
ratchet replay smoke 0 --name slower --from train --trainer.learning_rate 1e-5
ratchet replay smoke 0 --name sampled-again --from roll_out --allow-difference
"""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig
from infra.runs.replay import TaskName

Name = Annotated[str, Parameter(help="Name of the new run.")]
First = Annotated[TaskName, Parameter(name="--from", help="First task to run again.", metavar="TASK")]
Allow = Annotated[
    bool, Parameter(help="Keep the step even if nothing was changed and it did not come out the same.", negative=())
]


@takes_fields(RunConfig, preset=False, file=False, leaves_out=("name",))
def replay(
    run: str, step: int, /, *, name: Name, first: First = "train", allow_difference: Allow = False, chosen: Chosen
) -> None:
    from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings

    from flows.cli import interrupts
    from flows.cli.endings import again
    from flows.cli.session import DOWN, client_settings, results_settings
    from flows.cli.terminal import console, log_to_terminal, progress
    from flows.replay import replay_step
    from infra.services import prefect_address, servers
    from tasks.replays.begin_replay import plan_replay

    changes = list(chosen.changes)
    log_to_terminal()
    interrupts.in_flows()
    server = servers.living(servers.PREFECT)
    if server is None:
        prefect_address.given()
    plan_replay(run, step, first, name, changes)  # before a server is started
    # Without one Prefect starts its own for the time of this command; on a busy machine that takes a while.
    own = results_settings() | {PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: int(servers.START_TIMEOUT_S)}
    interrupts.say(
        lambda: (
            f"interrupted: the replay of step {step} has stopped; `{again()}` goes on with it; an engine that runs stays up: {DOWN}"
        )
    )
    with temporary_settings(client_settings(server.url) if server else own), progress():
        made = replay_step(run, step, name, first, changes, allow_difference)
    console.print(f"run {made.run}, step {made.step}: adapter {made.adapter.version}, {made.adapter.sha256}", soft_wrap=True)
