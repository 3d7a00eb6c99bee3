"""Two GPUs: tensor parallelism of 2 in both programs, GPUs of their own for each, and adapters on experts served right.

    python tests/gpu/two_gpus.py OUT.json experts --model MIXTURE_FOLDER      expert LoRA with TP=1 against TP=2
    python tests/gpu/two_gpus.py OUT.json steps --model FOLDER                three whole steps, TP=2 in engine and trainer
    python tests/gpu/two_gpus.py OUT.json split --model FOLDER                the same with one GPU for each, which never sleeps
    python tests/gpu/two_gpus.py OUT.json ahead --model FOLDER                and sampling for the next step meanwhile

experts: the adapter is on all linear layers, experts included; mean absolute differences of log-probabilities on fixed texts, beside the
weights and merged, with TP=1 and TP=2, from what the merged weights say with TP=1; and what the adapter, and its part on the experts, do
to them at all. Where there is one GPU, with TP=1 alone.
"""

import os
import sys
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from bench import Bench, parser, whole_step

from infra.colocation import plans
from infra.engines import open_engine
from infra.engines.health_checks import mean_abs_difference
from infra.engines.server import server_process
from infra.machine import devices, nvml
from infra.records import AdapterVersion
from infra.settings import settings
from infra.trainers import resident

MAX_DIFFERENCE_NATS = 0.05
DEVIATION = 0.08
"""Of the adapter's random weights."""
MIN_RATIO = 5
"""Of what the adapter does, and of what its experts alone do, to how far the ways of serving it are apart."""

Answers = list[list[float]]


def main() -> None:
    p = parser(__doc__)
    p.add_argument("what", choices=("experts", "steps", "split", "ahead"))
    p.add_argument("--steps", type=int, default=3)
    options = p.parse_args()
    if options.what in ("split", "ahead") and not options.small:
        if devices.num_gpus() < 2:
            sys.exit(
                f"{options.what} needs two NVIDIA GPUs, here are {devices.num_gpus()}; --small tries the script out on a CPU"
            )
        engine_gpu, trainer_gpu = nvml.numbers()[:2]
        os.environ |= {"RATCHET_ENGINE_GPUS": f"[{engine_gpu}]", "RATCHET_TRAINER_GPUS": f"[{trainer_gpu}]"}
        settings.cache_clear()
    bench = Bench(options, f"two-gpus-{options.what}")
    try:
        failed = experts(bench) if options.what == "experts" else steps(bench, options.what, options.steps)
    finally:
        server_process.stop_recorded()
        resident.stop_recorded()
    print("done" if not failed else f"FAILED: {'; '.join(failed)}")


def experts(bench: Bench) -> list[str]:
    """The adapter is a large one: what a defect would do has to stand out of the rounding."""
    adapter, without = bench.adapter(DEVIATION), bench.adapter(DEVIATION, zero="experts")
    versions = {"base": bench.base(), "adapter": adapter, "adapter without its experts": without}
    kinds = ["merged, TP=1", "adapter, TP=1", "merged, TP=2", "adapter, TP=2"]
    if bench.options.small:  # a CPU serves no adapters on experts beside the weights
        kinds = ["merged, TP=1"]
    elif devices.num_gpus() < 2:
        kinds = kinds[:2]
    found: dict[str, dict[str, Answers]] = {}
    for kind in kinds:
        serve, size = kind.split(", TP=")
        found[kind] = scores(bench, versions, lora_mode=serve, tensor_parallel=int(size))
        right = found["merged, TP=1"]
        effects = {name: difference(right["adapter"], right[name]) for name in versions}
        apart = {kind: {name: difference(each[name], right[name]) for name in versions} for kind, each in found.items()}
        bench.say(differences_from_merged_tp1=apart, effects=effects)
    worst, least = max(each["adapter"] for each in apart.values()), min(effects[name] for name in versions if name != "adapter")
    return [] if worst <= least / MIN_RATIO else [f"{worst} nats apart, where experts without an adapter would be {least}"]


def scores(bench: Bench, versions: Mapping[str, AdapterVersion], **changes: Any) -> dict[str, Answers]:
    """What a server of its own answers with each of them, text by text, in nats."""
    engine, answers = open_engine(bench.config.engine.but(**changes), versions["base"]), {}
    engine.wake()
    program = engine.program  # type: ignore[attr-defined]  # the raw verbs
    for name, version in versions.items():
        engine.load_adapter(version)
        answers[name] = [program.logprobs(tokens, version.served_name) for tokens in program.golden_tokens]
    server_process.stop_recorded()
    return answers


def difference(left: Answers, right: Answers) -> float:
    return fmean(mean_abs_difference(one, other) for one, other in zip(left, right, strict=True))


def steps(bench: Bench, what: str, count: int) -> list[str]:
    config = bench.config
    if what == "steps" and not bench.options.small:
        trainer = config.trainer.but(num_processes=2, tensor_parallel=2, sequence_parallel=True)
        config = config.but(engine=config.engine.but(tensor_parallel=2), trainer=trainer)
    if what == "ahead":
        loss = config.trainer.loss.but(correction={"mode": "decoupled", "kind": "tis", "max_staleness": 1})
        config = config.but(num_steps=count, trainer=config.trainer.but(loss=loss))
    engine, adapter, made = plans.resolve_colocation(config).engine, bench.base(), []
    bench.say(plan=plans.plan(config)._asdict())
    for number in range(count):
        adapter, figures = whole_step(config, engine, number, adapter)
        made.append(figures)
        bench.say(steps=made)
    return [
        f"step {n}: mismatch {each['mismatch']}" for n, each in enumerate(made) if not each["mismatch"] < 3 * MAX_DIFFERENCE_NATS
    ]


if __name__ == "__main__":
    main()
