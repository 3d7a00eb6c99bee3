"""The hand-over between engine and trainer: what each plan takes, frees, and gives back unharmed.

    python tests/gpu/hand_over.py OUT.json rounds [--plans reload resident offload] [--rounds 10] --model FOLDER [--set FIELD=VALUE ...]
    python tests/gpu/hand_over.py OUT.json steps [--steps 11] --model FOLDER --set trainer.mode=persistent [--set engine.colocation=PLAN]
    python tests/gpu/hand_over.py OUT.json run [--steps 11] ...

rounds: each plan's engine is put to sleep and woken again and again; its output, tokens and log-probabilities, must be the same bits
each time: of a rollout, and of texts that are asked for one at a time, where no batch can move a bit. Then the negative control:
weights that are dropped and not read again must be caught by the golden check.
steps: whole steps without Prefect; seconds from the last sampled token to the first training kernel and back, memory by phase and
process, KV cache, tokens a second in the last step against the first.
run: the same figures from the flow `rl-run`, with its Prefect server and MLflow, as a user runs it. All --steps are made, even past --limit-s.
On a GPU, watch.py records the driver's counters meanwhile: OUT.csv has them, and watched_idle_s the seconds from one step's first token to the
next one's in which no kernel ran.
before_after: steps in three ways, each with an engine of its own: with plan offload the copy on the host freed at each wake and experts' adapters
read one by one; the copy kept; the copy kept and experts stacked. A mixture has a fourth, with plan keep_weights: one copy of the experts for both
programs. Then a control: a weight that changed before a sleep must be caught after it.
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from bench import Bench, compared, continued, figures_of, parser, whole_step
from safetensors import safe_open
from safetensors.torch import save_file
from watch import idle_s, watching

from flows.cli.services.servers import stop
from flows.cli.session import with_prefect
from flows.run import rl_run
from infra.colocation import plans
from infra.colocation.confirm_memory import held_by
from infra.concurrency.prefetch import Prefetch
from infra.config import RunConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest
from infra.engines.server import server_process
from infra.engines.sglang import memory_api
from infra.engines.sglang.engine import SGLangEngine
from infra.failures import WrongAnswer
from infra.machine import devices, nvml
from infra.models import base_model
from infra.records import AdapterVersion, Step
from infra.runs.lineage import base_version
from infra.settings import settings
from infra.store.files import fresh_folder, verified_adapter, verified_for_engine
from infra.store.samples import Sample
from infra.telemetry import memory_usage
from infra.trainers import resident

GIB = 2**30
TO_TRAINING, TO_SAMPLING = "gpu_idle/to_training_s", "gpu_idle/to_sampling_s"


def main() -> None:
    p = parser(__doc__)
    p.add_argument("what", choices=("rounds", "steps", "run", "before_after"))
    p.add_argument("--plans", nargs="+", default=["reload", "keep_weights", "offload"])
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--steps", type=int, default=11)
    p.add_argument(
        "--ways", nargs="+", default=list(WAYS)[:3], choices=list(WAYS), help="of before_after; the last one for mixtures"
    )
    options = p.parse_args()
    bench = Bench(options, f"hand-over-{options.what}")
    try:
        failed = {"rounds": rounds, "steps": steps, "run": run, "before_after": before_after}[options.what](bench, options)
    finally:
        server_process.stop_recorded()
        resident.stop_recorded()
    print(f"{'done' if not failed else 'FAILED: ' + '; '.join(failed)}")


def rounds(bench: Bench, options: argparse.Namespace) -> list[str]:
    adapter, failed = bench.adapter(), []
    prompts = bench.prompts()[:8]
    for plan in options.plans:
        if not bench.has_time_for(120):
            failed.append(f"no time for plan {plan}")
            break
        # Only with seeds and kernels that do not depend on the batch can equal bits be asked for.
        begin = time.monotonic()
        engine = bench.engine(adapter, colocation=plan, deterministic=True)
        engine.wake()
        engine.load_adapter(adapter)
        start_s = time.monotonic() - begin
        alone, before = one_at_a_time(engine, adapter), sampled(engine, prompts, bench, adapter)
        server_process.post(server_process.recorded().url, "/flush_cache", {}, 60)  # type: ignore[union-attr]  # as a release does
        control = compared(before, sampled(engine, prompts, bench, adapter))  # what differs here no sleep has done
        made: list[dict[str, Any]] = []
        for number in range(options.rounds):
            figures = round_trip(engine, prompts, bench, adapter, before)
            made.append(figures | {"same_bits_alone": one_at_a_time(engine, adapter) == alone})
            bench.say(**{plan: {"start_s": start_s, "without_sleep": control, "rounds": made}})
            if not made[-1]["same_bits_alone"]:
                failed.append(f"plan {plan}: texts of round {number} differ")
            if not made[-1]["same_bits"]:
                failed.append(f"plan {plan}: rollout of round {number} differs")
        if plan == "reload":
            failed += negative_control(bench, engine, adapter)
        engine.stop()
    return failed


def sampled(engine: Engine, prompts: list[Prompt], bench: Bench, adapter: AdapterVersion) -> list[Sample]:
    return engine.generate(RolloutRequest(prompts, bench.config.sampling, adapter))[0]


def one_at_a_time(engine: Engine, adapter: AdapterVersion) -> list[Any]:
    """Log-probabilities of the golden texts and their greedy continuations, by the base model and through the adapter."""
    program = engine.program  # type: ignore[attr-defined]  # the raw verbs
    names = (None, adapter.served_name)
    return [(program.logprobs(text, name), continued(text, name)) for text in program.golden_tokens for name in names]


def round_trip(
    engine: Engine, prompts: list[Prompt], bench: Bench, adapter: AdapterVersion, before: list[Sample]
) -> dict[str, Any]:
    marks = [time.monotonic()]
    release = engine.release_memory()
    marks.append(time.monotonic())
    state = server_process.recorded()
    asleep = sum(held_by(state.process.program).by_gpu.values()) / GIB if state else 0.0
    total = sum(gpu.used_bytes for gpu in nvml.read().gpus) / GIB
    looked_at = time.monotonic()
    engine.wake()
    engine.load_adapter(adapter)
    woken_at = time.monotonic()
    after = sampled(engine, prompts, bench, adapter)
    return {
        "release_s": marks[1] - marks[0],
        "wake_s": woken_at - looked_at,
        "released_gib": release.released_bytes / GIB,
        "engine_asleep_gib": asleep,
        "gpus_asleep_gib": total,
        "kv_cache_tokens": server_process.kv_cache_tokens(),
        **compared(before, after),
    }


def negative_control(bench: Bench, engine: Engine, adapter: AdapterVersion) -> list[str]:
    """The weights are dropped and not read again; the server says that all is well."""
    read = memory_api.update_weights
    engine.release_memory()
    memory_api.update_weights = lambda url, folder, version: None
    try:
        engine.wake()
        engine.load_adapter(adapter)
    except WrongAnswer as error:
        bench.say(negative_control=f"caught: {error}"[:400])
        return []
    finally:
        memory_api.update_weights = read
    if devices.device() == "cpu":
        bench.say(negative_control="not possible: without a GPU nothing is dropped")
        return []
    return ["the golden check did not see that the weights were lost"]


def steps(bench: Bench, options: argparse.Namespace) -> list[str]:
    config = without_exams(bench.config, options.steps)
    engine, adapter, made = plans.resolve_colocation(config).engine, bench.base(), []
    bench.say(plan=plans.plan(config)._asdict())
    slowest = 0.0
    with Prefetch() as prefetch:
        for number in range(options.steps):
            if not bench.has_time_for(1.2 * slowest):
                break
            begin = time.monotonic()
            adapter, figures = whole_step(config, engine, number, adapter, prefetch)
            if number:  # the first one has the starts of both programs in it
                slowest = max(slowest, time.monotonic() - begin)
            made.append(figures)
            bench.write(steps=made)
    return judged(bench, made) + (
        [] if len(made) == options.steps else [f"only {len(made)} of {options.steps} steps in the time"]
    )


WAYS: dict[str, tuple[dict[str, Any], bool, Any]] = {
    "before": ({"colocation": "offload", "keep_host_copy": False}, False, verified_adapter),
    "copy kept": ({"colocation": "offload"}, False, verified_adapter),
    "experts stacked": ({"colocation": "offload"}, False, verified_for_engine),
    "experts shared": ({"colocation": "keep_weights"}, True, verified_for_engine),
}
"""Changes of the engine, trainer.share_experts, and how an adapter's folder for the engine is found."""


def before_after(bench: Bench, options: argparse.Namespace) -> list[str]:
    failed: list[str] = []
    bench.say(host_gib=psutil.virtual_memory().total / GIB)
    for way in options.ways:
        changes, shares, folder_of = WAYS[way]
        SGLangEngine.folder_of = staticmethod(folder_of)
        sections = {
            "engine": bench.config.engine.but(**changes),
            "trainer": bench.config.trainer.but(share_experts=shares),
        }
        config = without_exams(bench.config.but(name=f"{bench.config.name}-{way.replace(' ', '-')}", **sections), options.steps)
        resolved, adapter, made = plans.resolve_colocation(config).engine, base_version(config), []
        for number in range(options.steps):
            adapter, figures = whole_step(config, resolved, number, adapter)
            memory = psutil.virtual_memory()
            made.append(figures | {"host_used_gib": memory.used / GIB, "host_available_gib": memory.available / GIB})
            bench.say(**{way: {"steps": made, **turnaround(made)}})
        if way == options.ways[-1] and (changes["colocation"] == "offload" or devices.num_gpus()):  # else nothing sleeps
            failed += changed_weight(bench, open_engine(resolved, adapter), adapter)
        server_process.stop_recorded()
    return failed


def changed_weight(bench: Bench, engine: Engine, adapter: AdapterVersion) -> list[str]:
    """A weight on the GPU changes; the copy on the host, which was made before, must not hide it."""
    state, source = server_process.recorded(), base_model.locate(bench.options.model)
    folder = fresh_folder(settings().workspace / "changed-weight")
    shutil.copyfile(source / "config.json", folder / "config.json")
    name, norm = next((name, value) for name, value in norms(source) if name.endswith("model.norm.weight"))
    save_file({name: norm * 2 + torch.arange(len(norm)) % 3}, folder / "model.safetensors")
    assert state
    server_process.post(state.url, "/pause_generation", {"mode": "abort"}, 60)
    memory_api.update_weights(state.url, folder, memory_api.BASE_VERSION)
    server_process.post(state.url, "/continue_generation", {}, 60)
    engine.release_memory()
    try:
        engine.wake()
        engine.load_adapter(adapter)
    except WrongAnswer as error:
        bench.say(changed_weight=f"caught: {error}"[:400])
        return []
    return ["the golden check did not see that a weight had changed before the sleep"]


def norms(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys() if name.endswith("norm.weight"))  # noqa: SIM118


def run(bench: Bench, options: argparse.Namespace) -> list[str]:
    config = without_exams(bench.config, options.steps)
    bench.say(plan=plans.plan(config)._asdict())
    try:
        csv = bench.options.out.with_suffix(".csv") if devices.num_gpus() else None
        with watching(csv), with_prefect():
            rl_run(config)
        made = [figures_of(Step(run=config.name, index=number, seed=config.seed)) for number in range(options.steps)]
        bench.write(steps=made)
        if csv:
            bench.say(watched_idle_s=idle_s(csv, [step["first_token_at"] for step in made[1:]]))
        return judged(bench, made)
    finally:
        stop()


def without_exams(config: RunConfig, num_steps: int) -> RunConfig:
    """Nothing comes between two steps."""
    return config.but(num_steps=num_steps, evaluation=config.evaluation.but(every=0), export=config.export.but(what="nothing"))


def judged(bench: Bench, made: list[dict[str, Any]]) -> list[str]:
    """What grew, if there are eleven steps."""
    first, last = made[min(1, len(made) - 1)], made[-1]
    leaks = list(map(str, memory_usage.leaks_of_run(bench.config.name, len(made) - 1)))
    bench.say(
        leaks=leaks,
        steps_made=len(made),
        speed_kept=last["rollout_tokens_per_s"] / first["rollout_tokens_per_s"],
        kv_cache_kept=last["kv_cache_tokens"][-1] / max(first["kv_cache_tokens"][0], 1),
        **turnaround(made),
    )
    return leaks


def turnaround(made: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the steps after the first, in which the programs are started; and the share of a step that neither samples nor trains."""
    steady = made[1:] or made
    found = {
        name: median(each[name] for each in steady if name in each) for name in (TO_TRAINING, TO_SAMPLING) if name in steady[-1]
    }
    if len(steady) > 1:
        periods = [after["first_token_at"] - before["first_token_at"] for before, after in pairwise(steady)]
        found |= {"step_s": median(periods), "beside_frac": sum(found.values()) / median(periods)}
    return found


if __name__ == "__main__":
    main()
