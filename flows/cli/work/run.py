"""Make a training run, or what is left of it, in this terminal.

A run resumes at its first step that is not committed; docs/runs.md says what may change then.

ratchet run --preset arithmetic --num_steps 20
ratchet run --config my.yaml --trainer.learning_rate 3e-5        fields of a file, and one that is another
ratchet run --preset smoke --name mine --show                    what it would be made with
ratchet run --from s3://bucket/runs/mine                         a run that another machine began, from its copy in a store
"""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig

From = Annotated[
    str | None,
    Parameter(
        name="--from",
        help="Copy of a run in a store, as `ratchet runs --store` lists it; the run is continued here.",
        metavar="URL",
        show_default=False,
    ),
]


@takes_fields(RunConfig, show=True)
def run(*, chosen: Chosen, show: bool = False, copy: From = None) -> None:
    from flows.cli.endings import print_report
    from flows.cli.session import keep_resolved, print_resolved, stopped_line, with_prefect

    if copy and show:
        raise ValueError("--show does nothing, and --from fetches a run: give one of them")
    base = _fetched(copy, chosen) if copy else None
    config, found = chosen.run("arithmetic", base)
    if base and config.name != base.name:
        raise ValueError(f"--name {config.name} with --from {copy}: the copy of run {base.name} is continued under its own name")
    if show:
        print_resolved(found)
        return
    from flows.cli import interrupts
    from flows.cli.terminal import log_to_terminal
    from flows.run import rl_run
    from infra.services import prefect_address
    from tasks.support.preflight import check_run, open_run

    log_to_terminal()  # after Prefect is imported, which sets up lines of its own form
    prefect_address.given()  # a wrong address is an error before anything is written
    check_run(config)
    open_run(config, nothing_committed="leave")
    interrupts.say(lambda: stopped_line(config.name))
    with with_prefect(None if base else chosen.made_from("arithmetic")):
        keep_resolved(config, found)  # after all that can be refused: an error's line stands alone
        print_report(rl_run(config))


def _fetched(copy: str, chosen: Chosen) -> RunConfig:
    """The configuration of a run that was brought here from its copy."""
    from infra.mirror.fetching import fetch
    from infra.runs.run_state import config_of

    if chosen.preset:
        raise ValueError(
            f"--preset {chosen.preset} with --from {copy}: the copy has the run's configuration; single fields may be given"
        )
    return config_of(fetch(copy))
