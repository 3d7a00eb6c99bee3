"""Commit a step: its report, then its manifest; from then on it is done. After that the world is told."""

import importlib.metadata
import logging
import math
import platform
import time
from typing import Any

from prefect import task

from infra import devices, sources, tracking
from infra.config import RunConfig
from infra.engines import server
from infra.files import MANIFEST, read_json, sha256_of, step_folder, write_json
from infra.measures import SECONDS, measures_of
from infra.records import AdapterVersion, PromptBatch, Rollouts, ScoredRollouts, StepReport, TrainBatch
from infra.settings import CHECKOUT
from tasks import pages
from tasks.begin_step import BEGAN
from tasks.caching import NO_CACHE
from tasks.train import FOLDER, RESULT

log = logging.getLogger(__name__)

VERBS = ("draw", "wake", "roll_out", "score", "assemble", "release", "train", "reload")
PACKAGES = ("prefect", "mlflow", "torch", "megatron-core", "transformers", "datasets")


def metrics_of(
    rollouts: Rollouts, scored: ScoredRollouts, trained: dict[str, Any], measures: dict[str, dict[str, float]]
) -> dict[str, float]:
    """All figures of a step, by their names in MLflow; the unit is the name's ending."""
    rollout, release = measures["roll_out"], measures["release"]
    # A verb that was killed after its work was published, and before it said how long that took, has no seconds.
    seconds = {f"time/{verb}_s": measures[verb][SECONDS] for verb in VERBS if verb in measures}
    return {
        "reward/mean": scored.mean_reward,
        "reward/std": scored.std_reward,
        "reward/frac_zero_std_groups": 1 - scored.num_trainable_groups / scored.num_prompts,
        "rollout/output_tokens": float(rollouts.num_output_tokens),
        "rollout/tokens_per_s": rollouts.num_output_tokens / rollout[SECONDS],
        "rollout/truncated_frac": rollouts.num_truncated / rollouts.num_samples,
        "rollout/ttft_s": rollout["ttft_s"],
        "rollout/prefix_cache_hit_frac": rollout["prefix_cache_hit_frac"],
        "memory/inference_gib": rollout["memory_gib"],
        "memory/after_release_gib": release["memory_gib"],
        "memory/training_gib": trained["peak_memory_gib"],
        "memory/released_gib": release["released_bytes"] / 2**30,
        **trained["metrics"],
        **{f"time/train_{phase}_s": value for phase, value in trained["seconds"].items()},
        **seconds,
        "time/step_s": sum(seconds.values()),
    }


def overhead_of(batch: TrainBatch) -> dict[str, float]:
    """Seconds of this attempt that no verb accounts for: Prefect, caching, digests."""
    began = read_json(step_folder(batch) / BEGAN)["at"]
    accounted = sum(figures[SECONDS] for figures in measures_of(batch.run, batch.step, since=began).values())
    return {"time/overhead_s": max(0.0, time.time() - began - accounted)}


def manifest_of(
    config: RunConfig,
    prompts: PromptBatch,
    rollouts: Rollouts,
    scored: ScoredRollouts,
    batch: TrainBatch,
    start: AdapterVersion,
    trained: AdapterVersion,
) -> dict[str, Any]:
    """Digests of all that went into the step and came out of it, and what it ran with."""
    engine = server.recorded()
    return {
        "run": batch.run,
        "step": batch.step,
        "config": config.model_dump(mode="json"),
        "adapter_in": start.model_dump(mode="json"),
        "prompts": prompts.model_dump(mode="json"),
        "rollouts": rollouts.model_dump(mode="json"),
        "scored": scored.model_dump(mode="json"),
        "batch": batch.model_dump(mode="json"),
        "adapter_out": trained.model_dump(mode="json"),
        "hand_over": devices.plan(config.engine)._asdict(),
        "engine_identity": engine.identity if engine else None,
        "code": sources.digest("flows", "tasks", "infra"),
        "locks": {path.name: sha256_of(path) for path in sorted((CHECKOUT / "infra/locks").glob("*.txt"))},
        "versions": {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES},
        "committed_at": time.time(),
    }


def commit(made: StepReport, manifest: dict[str, Any]) -> None:
    """The report first, the manifest last: a step with a manifest is done.

    Raises:
        ValueError: for a metric that is not finite; nothing is committed.
    """
    wrong = {name: value for name, value in made.metrics.items() if not math.isfinite(value)}
    if wrong:
        raise ValueError(f"step {made.step} of run {made.run!r} is not committed, these metrics are not finite: {wrong}")
    write_json(step_folder(made) / "report.json", made.model_dump(mode="json"))
    write_json(step_folder(made) / MANIFEST, manifest)
    log.info("step %d of run %s is committed: adapter %d, %s", made.step, made.run, made.adapter.version, made.adapter.sha256)


@task(cache_policy=NO_CACHE)
def report(
    config: RunConfig,
    start: AdapterVersion,
    prompts: PromptBatch,
    rollouts: Rollouts,
    scored: ScoredRollouts,
    batch: TrainBatch,
    trained: AdapterVersion,
) -> StepReport:
    """All receipts of a step -> StepReport; the step is committed when this returns."""
    outcome = read_json(step_folder(batch) / FOLDER / RESULT)
    metrics = metrics_of(rollouts, scored, outcome, measures_of(batch.run, batch.step)) | overhead_of(batch)
    made = StepReport(run=batch.run, step=batch.step, adapter=trained, metrics=metrics)
    commit(made, manifest_of(config, prompts, rollouts, scored, batch, start, trained))
    pages.show(made, devices.plan(config.engine), config.tracking, mlflow_run=tracking.deliver(made.run))
    return made
