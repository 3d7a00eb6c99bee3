"""Make the next step of a run, in this terminal.

ratchet step                                                     the next step of the run `smoke`
ratchet step --preset arithmetic --name mine
ratchet step --config .ratchet/runs/mine/config.json             of a run that is there
"""

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig


@takes_fields(RunConfig, show=True)
def step(*, chosen: Chosen, show: bool = False) -> None:
    from flows.cli.endings import print_step
    from flows.cli.session import keep_resolved, print_resolved, stopped_line, with_prefect

    config, found = chosen.run("smoke")
    if show:
        print_resolved(found)
        return
    from flows.cli import interrupts
    from flows.cli.terminal import log_to_terminal
    from flows.step import rl_step
    from infra.services import prefect_address
    from tasks.support.preflight import check_step, open_run

    log_to_terminal()
    prefect_address.given()  # a wrong address is an error before anything is written
    check_step(config)
    open_run(config, nothing_committed="leave")
    interrupts.say(lambda: stopped_line(config.name))
    with with_prefect(chosen.made_from("smoke")):
        keep_resolved(config, found)  # after all that can be refused: an error's line stands alone
        made = rl_step(config)
    print_step(made.run, made.step)
