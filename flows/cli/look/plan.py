"""Plan how engine and trainer share the GPUs of a machine: the three fastest ways that fit, with estimated seconds and memory. No GPU is needed.

--model is a folder with config.json, or one of the shapes qwen2.5-0.5b, -1.5b, -3b, -7b, qwen3-30b-a3b.

ratchet plan --gpus 8xH100 --model qwen2.5-7b
ratchet plan --gpus 2xH200 --model qwen2.5-7b --max-staleness 0    on-policy only
ratchet plan --gpus 8xH100 --model qwen2.5-7b --json               for programs
"""

from typing import Annotated

from cyclopts import Parameter

from infra.simulation.machine_plan import MachinePlan, Planned, PlannedStep

Gpus = Annotated[str, Parameter(help="Number, 1 to 8, and kind of the GPUs, such as 8xH100.", metavar="NxKIND")]
ModelName = Annotated[str, Parameter(help="Folder of the base model, or a known shape.", metavar="FOLDER|SHAPE")]
Step = Annotated[PlannedStep, Parameter(name="*")]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.", negative=())]
DEFAULTS = PlannedStep()


def plan(*, gpus: Gpus, model: ModelName, work: Step = DEFAULTS, as_json: Json = False) -> None:
    import json

    from infra.simulation.machine_plan import plan_machine

    found = plan_machine(gpus, model, work)
    if as_json:
        on_policy = _fields(found.on_policy, work, model) if found.on_policy else None
        best = [_fields(each, work, model) for each in found.best]
        print(json.dumps({"rates": found.rates._asdict(), "best": best, "on_policy": on_policy}, indent=1))
    else:
        _show(found, work, model)


def _show(found: MachinePlan, work: PlannedStep, model: str) -> None:
    from infra.simulation.plan_words import command, lines_of

    print("\n".join(lines_of(found)))
    print(f"The first one:\n{command(found.best[0], work, _pasted(model))}")


def _pasted(model: str) -> str:
    """A shape has no weights: the command leaves a word for their folder."""
    import shlex

    from infra.forecast.shapes import SHAPES

    return "FOLDER" if model.lower() in SHAPES else shlex.quote(model)


def _fields(planned: Planned, work: PlannedStep, model: str) -> dict[str, object]:
    from infra.simulation.plan_words import command, options, sharing

    c = planned.candidate
    figures = {"step_s": planned.step_s, "rollout_s": planned.rollout_s, "train_s": planned.train_s}
    memory = {"engine_gib": c.engine_gib, "trainer_gib": c.trainer_gib, "gpu_idle_share": planned.gpu_idle_share}
    return {
        "sharing": sharing(planned),
        **figures,
        **memory,
        "options": options(planned, work),
        "command": command(planned, work, _pasted(model)),
    }
