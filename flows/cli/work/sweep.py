"""Make a run for each combination of some fields' values, one after the other, in this terminal.

Runs that differ after sampling only share the rollouts of step 0. Run the same again to go on.

ratchet sweep --preset arithmetic --name rates --over trainer.learning_rate=1e-4,3e-4,1e-3
ratchet sweep --name rates --over trainer.learning_rate=1e-4,3e-4 --over seed=0,1        four runs
ratchet sweep --name sizes --over sampling.group_size=4,8 --show                         which runs it would be
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig
from infra.config.tools.reward_file import absolute_in_sweep

if TYPE_CHECKING:
    from infra.eval_records import RunReport

Over = Annotated[
    list[str], Parameter(help="A field and its values; may be given several times.", metavar="FIELD=VALUE,VALUE", negative=())
]


@takes_fields(RunConfig, show=True)
def sweep(*, over: Over, chosen: Chosen, show: bool = False) -> None:
    from flows.cli import interrupts
    from flows.cli.endings import again
    from flows.cli.session import DOWN, with_prefect
    from flows.cli.terminal import log_to_terminal
    from infra.services import prefect_address
    from tasks.sweeps.begin_sweep import check_sweep

    log_to_terminal()
    config, _ = chosen.run("arithmetic")
    over = [absolute_in_sweep(words, Path.cwd()) for words in over]
    if not show:
        prefect_address.given()
    variants = check_sweep(config, over)
    if show:
        print_variants(config, variants)
        return
    from flows.sweep import rl_sweep

    interrupts.say(
        lambda: (
            f"interrupted: sweep {config.name} has stopped, its runs keep what they have; `{again()}` goes on there; engine and servers stay up: "
            f"{DOWN}"
        )
    )
    with with_prefect(chosen.made_from("arithmetic")):
        print_variants(config, variants)  # after all that can be refused: an error's line stands alone
        print_reports(rl_sweep(config, over))


def print_variants(base: RunConfig, variants: Sequence[RunConfig]) -> None:
    from rich.table import Table

    from flows.cli.terminal import console
    from infra.config.tools.grid import overrides_between

    table = Table(title=f"sweep {base.name}: {len(variants)} runs")
    table.add_column("run", overflow="fold")
    table.add_column("what differs", overflow="fold")
    for variant in variants:
        differing = [change for change in overrides_between(base, variant) if not change.startswith("tracking.sweep=")]
        table.add_row(variant.name, ", ".join(differing))
    console.print(table)


def print_reports(made: "Sequence[RunReport]") -> None:
    from rich.table import Table

    from flows.cli.terminal import console

    table = Table(title="what they came to")
    table.add_column("run", overflow="fold")
    for column in ("steps", "pass@1 first", "last", "best", "of adapter"):
        table.add_column(column, justify="right")
    for report in made:
        scores = [each.pass_at_1 for each in report.evaluations]
        figures = [f"{score:.3f}" for score in (scores[0], scores[-1], max(scores))] if scores else ["", "", ""]
        table.add_row(report.run, str(report.num_steps), *figures, str(report.best.version))
    console.print(table)
