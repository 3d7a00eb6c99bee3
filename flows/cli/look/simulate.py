"""Simulate a run on 1 to 1024 GPUs: samples per second, idle GPUs, staleness, effective training time. No GPU is needed.

The defaults are rates measured with a 7B model on H200s. --from-run takes the lengths of the samples of a run of this workspace.

ratchet simulate --gpus 8 --trainer-gpus 4 --max-staleness 1
ratchet simulate --gpus 64 --num-prompts 512 --failures-every 10
ratchet simulate --turns 4 --tool-latency-s 5 --json             for programs
"""

from typing import Annotated

from cyclopts import Parameter

from infra.simulation.scenario import Scenario

Chosen = Annotated[Scenario, Parameter(name="*")]
Lengths = Annotated[str | None, Parameter(help="Run whose samples' lengths are used.", metavar="RUN", show_default=False)]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.", negative=())]
DEFAULTS = Scenario()


def simulate(*, scenario: Chosen = DEFAULTS, from_run: Lengths = None, as_json: Json = False) -> None:
    import json

    from flows.cli.terminal import console
    from infra.simulation import forecast, recorded

    lengths = recorded.lengths_of(from_run) if from_run else ()
    found = forecast.simulate(scenario, lengths)
    if as_json:
        print(json.dumps({"scenario": scenario.model_dump(), "forecast": found._asdict()}, indent=1))
        return
    how = f"{scenario.trainer_gpus} of them for the trainer" if scenario.trainer_gpus else "engine and trainer in turns"
    console.print(
        f"{scenario.gpus} GPUs, {how}; {scenario.num_replicas} replicas of {scenario.tensor_parallel}; {found.num_steps} steps"
    )
    for name, value in {
        "step": f"{found.step_s:.1f} s",
        "samples": f"{found.samples_per_s:.2f} a second",
        "tokens": f"{found.tokens_per_s:,.0f} a second, {found.tokens_per_s_per_gpu:,.0f} a GPU",
        "GPUs idle": f"{found.gpu_idle_share:.1%}",
        "staleness": f"{found.mean_staleness:.2f} steps on average",
        "effective": f"{found.effective_ratio:.1%} of the time without failures; {found.num_failures} failures",
    }.items():
        console.print(f"  {name:<10} {value}")
