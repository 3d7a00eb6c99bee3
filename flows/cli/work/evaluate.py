"""Put the questions of evaluation sets to an adapter, in this terminal.

Evaluates the latest adapter of RUN, or the one that --adapter names: best, latest or a version (0 is the base model), the path of a PEFT
folder or of a whole Hugging Face model, or OTHER:VERSION for another run's. Without RUN the configuration comes from a preset, a file and fields.

ratchet evaluate mine                                            the latest adapter of the run `mine`
ratchet evaluate mine --adapter /models/other --evaluation.num_prompts 500
ratchet evaluate mine --against 0                                what it differs by from its base model, with intervals
"""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig

Run = Annotated[str | None, Parameter(help="Name of a run whose configuration and adapters are taken.", show_default=False)]
Adapter = Annotated[
    str | None,
    Parameter(help="best, latest or a version of the run, a path, or RUN:VERSION; left out, the latest.", metavar="VERSION|PATH"),
]
Against = Annotated[
    str | None,
    Parameter(help="Another adapter: shows what the two differ by, paired by question, with intervals.", metavar="VERSION|PATH"),
]
Sets = Annotated[
    list[str] | None, Parameter(name="--set", help="Name of a set to ask; left out, all.", negative=(), metavar="NAME")
]


@takes_fields(RunConfig)
def evaluate(run: Run = None, /, *, adapter: Adapter = None, against: Against = None, sets: Sets = None, chosen: Chosen) -> None:
    from flows.cli import interrupts
    from flows.cli.session import DOWN, with_prefect
    from flows.cli.terminal import console, log_to_terminal
    from infra.runs.run_state import config_of

    config, _ = chosen.run("arithmetic", config_of(run) if run else None)
    from flows import evaluate as flow
    from flows.cli.endings import print_table
    from infra.reporting.brief_lines import OF_DIFFERENCE, difference_rows
    from infra.services import prefect_address

    log_to_terminal()
    prefect_address.given()
    flow.chosen_sets(config, sets)
    flow.check(config, _choice(adapter), _choice(against))
    interrupts.say(
        lambda: f"interrupted: the evaluation has stopped and keeps the answers that it has; engine and servers stay up: {DOWN}"
    )
    with with_prefect(None if run else chosen.made_from("arithmetic")):
        made = flow.evaluate(config, _choice(adapter), _choice(against), sets)
    for each in (*made.against, *made.evaluations):
        console.print(
            f"adapter {each.step} of run {each.run}, {each.num_prompts} questions, {each.num_overlapping} of them trained on",
            style="bold",
            markup=False,
            soft_wrap=True,
        )
        for name, value in each.metrics.items():  # pass@1 first
            console.print(f"  {name:32} {value:.4g}", markup=False)
    if made.differences:
        title = f"{made.differences[0].second} minus {made.differences[0].first}, paired by question"
        print_table(title, OF_DIFFERENCE, difference_rows(made.differences))


def _choice(adapter: str | None) -> int | str | None:
    return int(adapter) if adapter and adapter.isdecimal() else adapter
