"""Put held-out questions to an adapter, in this terminal.

Evaluates the latest adapter of RUN, or the one that --adapter names: a version (0 is the base model), or the path of a PEFT folder
or of a whole Hugging Face model. Without RUN the configuration comes from a preset, a file and fields.

ratchet evaluate mine                                            the latest adapter of the run `mine`
ratchet evaluate mine --adapter 0                                its base model
ratchet evaluate mine --adapter /models/other --evaluation.num_prompts 500
"""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.fields import Chosen, takes_fields
from infra.config import RunConfig

Run = Annotated[str | None, Parameter(help="Name of a run whose configuration and adapters are taken.", show_default=False)]
Adapter = Annotated[str | None, Parameter(help="Version of the run, or path; left out, the latest.", metavar="VERSION|PATH")]


@takes_fields(RunConfig)
def evaluate(run: Run = None, /, *, adapter: Adapter = None, chosen: Chosen) -> None:
    from flows.cli import interrupts
    from flows.cli.session import DOWN, with_prefect
    from flows.cli.terminal import console
    from infra.runs.run_state import config_of

    config, _ = chosen.run("arithmetic", config_of(run) if run else None)
    from flows import evaluate as flow
    from infra.services import prefect_address
    from tasks.support.preflight import check_with_evaluation

    prefect_address.given()
    check_with_evaluation(config)
    interrupts.say(
        lambda: f"interrupted: the evaluation has stopped and keeps the answers that it has; engine and servers stay up: {DOWN}"
    )
    with with_prefect(None if run else chosen.made_from("arithmetic")):
        made = flow.evaluate(config, int(adapter) if adapter and adapter.isdecimal() else adapter)
    for name, value in made.metrics.items():  # pass@1 first
        console.print(f"{name:32} {value:.4g}")
    console.print(
        f"adapter {made.step} of run {made.run}, {made.num_prompts} questions, {made.num_overlapping} of them trained on"
    )
