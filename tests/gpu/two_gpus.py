"""Two GPUs: tensor parallelism of 2 in both programs, GPUs of their own for each, and adapters on experts served right.

    python tests/gpu/two_gpus.py OUT.json experts --model MIXTURE_FOLDER      expert LoRA with TP=1 against TP=2
    python tests/gpu/two_gpus.py OUT.json steps --model FOLDER                three whole steps, TP=2 in engine and trainer
    python tests/gpu/two_gpus.py OUT.json split --model FOLDER                the same with one GPU for each, which never sleeps
    python tests/gpu/two_gpus.py OUT.json ahead --model FOLDER                and sampling for the next step meanwhile

experts: the adapter is on all linear layers, experts included; mean absolute differences of log-probabilities on fixed texts between
TP=1 and TP=2, beside the weights and merged, and how far the adapter moves them at all. Where there is one GPU, with TP=1 alone.
"""

import os
import sys
from statistics import fmean
from typing import Any

from bench import Bench, parser, whole_step

from infra import devices, driver, hand_over
from infra.engines import open_engine, server
from infra.engines.golden import mean_abs_difference
from infra.records import AdapterVersion
from infra.settings import settings
from infra.trainers import resident

MAX_DIFFERENCE_NATS = 0.05


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
        engine_gpu, trainer_gpu = driver.numbers()[:2]
        os.environ |= {"RATCHET_ENGINE_GPUS": f"[{engine_gpu}]", "RATCHET_TRAINER_GPUS": f"[{trainer_gpu}]"}
        settings.cache_clear()
    bench = Bench(options, f"two-gpus-{options.what}")
    try:
        failed = experts(bench) if options.what == "experts" else steps(bench, options.what, options.steps)
    finally:
        server.stop_recorded()
        resident.stop_recorded()
    print("done" if not failed else f"FAILED: {'; '.join(failed)}")


def experts(bench: Bench) -> list[str]:
    adapter, found = bench.adapter(), {}
    sizes = (1, 2) if devices.num_gpus() > 1 else (1,)
    for serve in (
        ("merged",) if bench.options.small else ("adapter", "merged")
    ):  # a CPU serves no expert adapters beside the weights
        for size in sizes:
            found[f"{serve}, TP={size}"] = said(bench, adapter, serve=serve, tensor_parallel=size)
            server.stop_recorded()
    base = said(bench, bench.base(), serve="merged", tensor_parallel=1)
    first = found["merged, TP=1"]
    differences = {name: difference(each, first) for name, each in found.items()}
    effect = difference(base, first)
    bench.say(differences_from_merged_tp1=differences, effect_of_the_adapter=effect)
    if effect < MAX_DIFFERENCE_NATS / 10:
        return [f"the adapter moves nothing: {effect}"]
    return [f"{name}: {value} nats" for name, value in differences.items() if not value <= MAX_DIFFERENCE_NATS]


def said(bench: Bench, adapter: AdapterVersion, **changes: Any) -> list[list[float]]:
    checked = open_engine(bench.config.engine.but(**changes), adapter)
    checked.wake()
    checked.load_adapter(adapter)
    program = checked.program  # type: ignore[attr-defined]  # the raw verbs
    return [program.logprobs(tokens, adapter.served_name) for tokens in program.golden_tokens]


def difference(left: list[list[float]], right: list[list[float]]) -> float:
    return fmean(mean_abs_difference(one, other) for one, other in zip(left, right, strict=True))


def steps(bench: Bench, what: str, count: int) -> list[str]:
    config = bench.config
    if what == "steps" and not bench.options.small:
        trainer = config.trainer.but(num_processes=2, tensor_parallel=2, sequence_parallel=True)
        config = config.but(engine=config.engine.but(tensor_parallel=2), trainer=trainer)
    if what == "ahead":
        loss = config.trainer.loss.but(correction={"mode": "decoupled", "kind": "tis", "max_age": 1})
        config = config.but(num_steps=count, trainer=config.trainer.but(loss=loss))
    engine, adapter, made = hand_over.planned(config), bench.base(), []
    bench.say(plan=hand_over.plan(config)._asdict())
    for number in range(count):
        adapter, figures = whole_step(config, engine, number, adapter)
        made.append(figures)
        bench.say(steps=made)
    return [
        f"step {n}: mismatch {each['mismatch']}" for n, each in enumerate(made) if not each["mismatch"] < 3 * MAX_DIFFERENCE_NATS
    ]


if __name__ == "__main__":
    main()
