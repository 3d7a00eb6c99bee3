"""Measure rollout engines under the same RL loop, and report which differences are larger than the spread.

An interrupted comparison resumes where it stopped.

ratchet compare-engines                                          both engines, mode inference
ratchet compare-engines --mode training --num_steps 5            with the real Megatron step
ratchet compare-engines --backends vllm --rounds 1               one engine alone
"""

from flows.cli.fields import Chosen, takes_fields
from infra.comparison.config import ComparisonConfig


@takes_fields(ComparisonConfig, preset=False)
def compare_engines(*, chosen: Chosen) -> None:
    from flows.cli import interrupts
    from flows.cli.endings import again
    from flows.cli.session import DOWN, with_prefect
    from flows.cli.terminal import console

    config = chosen.other(ComparisonConfig())
    from flows import compare_engines as flow
    from infra.services import prefect_address
    from tasks.comparisons.begin_comparison import check_comparison

    prefect_address.given()
    check_comparison(config)
    interrupts.say(
        lambda: (
            f"interrupted: the comparison has stopped and keeps the steps that it has; `{again()}` goes on there; what runs stays up: {DOWN}"
        )
    )
    with with_prefect():
        output = flow.compare_engines(config)
    console.print(f"report   {output}/benchmark_report.txt")
