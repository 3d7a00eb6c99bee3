"""Make a training run, or what is left of it, in this terminal.

A run resumes at its first step that is not committed; docs/runs.md says what may change then.

ratchet run --preset arithmetic --num_steps 20
ratchet run --config my.yaml --trainer.learning_rate 3e-5        fields of a file, and one that is another
ratchet run --preset smoke --name mine --show                    what it would be made with
"""

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig


@takes_fields(RunConfig, show=True)
def run(*, chosen: Chosen, show: bool = False) -> None:
    from flows.cli.endings import print_report
    from flows.cli.session import keep_resolved, print_resolved, stopped_line, with_prefect

    config, found = chosen.run("arithmetic")
    if show:
        print_resolved(found)
        return
    from flows.cli import interrupts
    from flows.run import rl_run
    from infra.services import prefect_address
    from tasks.support.preflight import check_run, open_run

    prefect_address.given()  # a wrong address is an error before anything is written
    check_run(config)
    open_run(config, nothing_committed="leave")
    interrupts.say(lambda: stopped_line(config.name))
    with with_prefect(chosen.made_from("arithmetic")):
        keep_resolved(config, found)  # after all that can be refused: an error's line stands alone
        print_report(rl_run(config))
