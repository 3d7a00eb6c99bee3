"""Commit a step: write its report, then its manifest, which completes it. Afterwards the step is published."""

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

from prefect import task

from infra import engines
from infra.config import RunConfig
from infra.environments.parts import TOOL_ERRORS
from infra.failures import MemoryLeak
from infra.forecast import step_forecast
from infra.forecast.step_forecast import read_forecast
from infra.machine.devices import Plan
from infra.progress.brief import brief
from infra.records import (
    AdapterVersion,
    EngineRan,
    PromptBatch,
    Rollouts,
    ScoredRollouts,
    StepRecord,
    StepReport,
    TrainBatch,
    TrainerRan,
)
from infra.reporting import step_page
from infra.reporting.headline_metrics import PARTS
from infra.rewards.judges.ledger import step_work
from infra.runs import lineage
from infra.runs.accounting import unused
from infra.runs.manifest import Manifest, Ran, environment, program_changes, read_manifest
from infra.runs.replay import Origin, origin_of
from infra.store import check_costs
from infra.store.check_costs import counted
from infra.store.files import read_json, sync, sync_folder, verified, write_json
from infra.store.layout import StepFolder, adapter_folder
from infra.telemetry import memory_usage
from infra.telemetry.gpu_idle import gpu_idle_of
from infra.telemetry.timings import BEGAN_AT, SECONDS, folder_of, measures_of, summed_draws
from infra.tracking import upload
from infra.trainers import resident
from tasks.rewards import by_model
from tasks.support.artifacts import page_of_this_flow, show_step
from tasks.support.caching import NO_CACHE
from tasks.support.planning.layout import words_of
from tasks.support.prefetch_rollout import max_staleness, num_steps_ahead
from tasks.support.rollout import engine_ran
from tasks.support.rollouts.in_flight import MIXED, RECOMPUTED, SWITCH_S

log = logging.getLogger(__name__)

VERBS = ("start_judge", "draw", "wake", "roll_out", "judge", "score", "gather", "assemble", "release", "train", "reload")


def metrics_of(
    rollouts: Rollouts, scored: ScoredRollouts, trained: dict[str, Any], measures: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Return all metrics of a step, by their names in MLflow. The name ends with the unit."""
    # A verb that was killed after its work was published, and before its time was recorded, has no seconds. Nor has
    # one whose result a replay reused.
    seconds = {f"time/{verb}_s": measures[verb][SECONDS] for verb in VERBS if verb in measures}
    return {
        "reward/mean": scored.mean_reward,
        "reward/std": scored.std_reward,
        # A group of one has nothing to differ from, and needs nothing.
        **(
            {"reward/frac_zero_std_groups": 1 - scored.num_trainable_groups / scored.num_prompts} if scored.group_size > 1 else {}
        ),
        **_unjudged_metrics(scored),
        **{f"{PARTS}{part}/mean": value for part, value in scored.part_means.items()},
        **{f"{PARTS}{part}/std": value for part, value in scored.part_stds.items()},
        "rollout/output_tokens": float(rollouts.num_output_tokens),
        "rollout/mean_output_tokens": rollouts.num_output_tokens / rollouts.num_samples,
        "rollout/truncated_frac": rollouts.num_truncated / rollouts.num_samples,
        "rollout/older_tokens_frac": rollouts.num_older_tokens / max(1, rollouts.num_output_tokens),
        **({"rollout/retracted_frac": rollouts.num_retracted / rollouts.num_samples} if rollouts.num_retracted else {}),
        **_episode_metrics(rollouts, measures),
        "memory/training_gib": trained["peak_memory_gib"],
        **_judge_metrics(measures),
        **_engine_metrics(measures),
        **trained["metrics"],
        **{f"time/train_{phase}_s": value for phase, value in trained["seconds"].items()},
        **seconds,
    }


def _episode_metrics(rollouts: Rollouts, measures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the metrics that exist only in a step of episodes."""
    if not rollouts.num_turns:
        return {}
    found = measures.get("roll_out", {})
    kept = {f"episodes/{name}_turns": value for name in ("kept", "lost") if (value := found.get(f"num_{name}_turns"))}
    played = {
        f"episodes/{name}": found[name]
        for name in ("branches", "prefix_mismatches", "tool_calls", "tool_errors", "resumed", "stopped", "carried_turns")
        if name in found
    }
    played |= {f"episodes/{name}": value for name, value in found.items() if name.startswith(TOOL_ERRORS)}
    if seconds := found.get("model_s", 0.0) + found.get("environment_s", 0.0):
        played["episodes/environment_frac"] = found["environment_s"] / seconds
    return {
        "episodes/mean_turns": rollouts.num_turns / rollouts.num_samples,
        "episodes/given_tokens": float(rollouts.num_given_tokens),
        **kept,
        **played,
    }


def _unjudged_metrics(scored: ScoredRollouts) -> dict[str, float]:
    """Return the metrics that exist only in a step with unjudged samples, but for the share of them."""
    by_reason = {
        f"reward/unjudged/{reason.replace(' ', '_')}_frac": count / scored.num_samples
        for reason, count in scored.num_unjudged.items()
    }
    groups = (
        {"reward/frac_unjudged_groups": scored.num_unjudged_groups / scored.num_prompts} if scored.num_unjudged_groups else {}
    )
    return {"reward/unjudged_frac": sum(scored.num_unjudged.values()) / scored.num_samples, **by_reason, **groups}


def _judge_metrics(measures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return what a model that judges took: for this step, all attempts included, and so far in the run."""
    found = measures.get("score", {})
    return {name.replace("_", "/", 1): value for name, value in found.items() if name.startswith(by_model.FIGURE)}


def _engine_metrics(measures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the metrics that exist only if the engine ran in this step."""
    found: dict[str, float] = {}
    if rollout := measures.get("roll_out"):
        found |= {
            # Samples recovered from a failed attempt cost this one nothing.
            "rollout/tokens_per_s": rollout["num_new_output_tokens"] / rollout[SECONDS],
            "rollout/kept_samples": rollout["num_kept"],
            "rollout/ttft_s": rollout["ttft_s"],
            "rollout/prefix_cache_hit_frac": rollout["prefix_cache_hit_frac"],
            "memory/inference_gib": rollout["memory_gib"],
        }
        found |= {f"rollout/{name}": rollout[name] for name in (MIXED, SWITCH_S, RECOMPUTED) if name in rollout}
        if lost := rollout.get("num_lost_replicas"):
            found |= {"rollout/lost_replicas": lost, "rollout/moved_samples": rollout["num_moved_samples"]}
        if reissued := rollout.get("num_reissued_samples"):
            found["rollout/reissued_samples"] = reissued
    # The same server before and after a step, or one started in it: its KV cache must not become smaller.
    for verb, name in {"wake": "memory/kv_cache_tokens", "reload": "memory/kv_cache_tokens_after_wake"}.items():
        if tokens := measures.get(verb, {}).get("kv_cache_tokens"):
            found[name] = tokens
    found |= {f"engine/{name}": value for name, value in measures.get("wake", {}).items() if name.startswith("start_")}
    if release := measures.get("release"):
        found |= {
            "memory/after_release_gib": release["memory_gib"],
            "memory/released_gib": release["released_bytes"] / 2**30,
        }
    return found


def times_of(batch: TrainBatch, now: float) -> dict[str, float]:
    """Return the seconds from the step's start to now, and how many of them were overhead without any of its work: Prefect, caching, digests.

    The step starts with its latest attempt or with its prefetched rollout, but not before the previous step was committed. So the times of
    a run's steps add up to its total time.

    now: Seconds since the epoch.
    """
    begin = max(read_json(StepFolder.of(batch).began)["at"], _committed_before(batch))
    done = [(figures[BEGAN_AT], figures[BEGAN_AT] + figures[SECONDS]) for figures in measures_of(batch.run, batch.step).values()]
    return {"time/step_s": now - begin, "time/overhead_s": now - begin - covered(done, begin, now)}


def covered(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Return how much of the time from begin to end lies in any of the intervals. Overlaps count once."""
    total, reached = 0.0, begin
    for start, stop in sorted(intervals):
        total += max(0.0, min(stop, end) - max(start, reached))
        reached = max(reached, min(stop, end))
    return total


def _committed_before(batch: TrainBatch) -> float:
    """Return when the previous step was committed, in seconds since the epoch; 0 for a run's first step."""
    path = StepFolder.at(batch.run, batch.step - 1).manifest
    return read_manifest(path.parent).committed_at if path.exists() else 0.0


def stop_what_leaks(made: StepReport) -> None:
    """End a process that holds more memory than ten steps ago. Raises MemoryLeak, which names it. The step stays committed."""
    found = memory_usage.leaks_of_run(made.run, made.step)
    if not found:
        return
    stops = {"engine": engines.stop_recorded, "trainer": resident.stop_recorded}
    for process in {leak.row.process for leak in found}:
        stops[process]()
    raise MemoryLeak(f"step {made.step} of run {made.run!r} is committed, but memory leaks: {'; '.join(map(str, found))}")


@counted("manifest")
def manifest_of(
    config: RunConfig,
    plan: Plan,
    prompts: PromptBatch,
    rollouts: Rollouts,
    scored: ScoredRollouts,
    batch: TrainBatch,
    start: AdapterVersion,
    trained: AdapterVersion,
    ran: tuple[EngineRan, TrainerRan],
) -> Manifest:
    """Make the manifest: digests of all inputs and outputs of the step, and the programs that it ran with."""
    replayed = _origin_of_step(batch)
    reward_source = replayed.reward_source if replayed else None
    return Manifest(
        run=batch.run,
        step=batch.step,
        config=config,
        adapter_in=start,
        prompts=prompts,
        rollouts=rollouts,
        scored=scored,
        batch=batch,
        adapter_out=trained,
        colocation=plan._asdict() | ({"layout": planned} if (planned := words_of(batch.run)) else {}),
        engine=ran[0],
        trainer=ran[1],
        reward_source=scored.reward_source if reward_source is None else reward_source,
        replayed_from=replayed.replayed_from if replayed else None,
        committed_at=time.time(),
        **dict(environment()),
    )


def _origin_of_step(record: StepRecord) -> Origin | None:
    """Return the origin of a replayed step; None for any other step."""
    origin = origin_of(record.run)
    return origin if origin and origin.replayed_from.step == record.step else None


def programs_of(batch: TrainBatch, outcome: dict[str, Any]) -> tuple[EngineRan, TrainerRan]:
    """Return the programs that made samples and adapter, as reported by themselves.

    outcome: The trainer's result.json.
    """
    replayed = _origin_of_step(batch)
    engine = (replayed.engine if replayed else None) or engine_ran(StepFolder.of(batch).path)
    return engine, TrainerRan(versions=outcome["versions"], backends=outcome["backends"])


def changes_since_step_before(batch: TrainBatch, engine: EngineRan, trainer: TrainerRan, reward_source: str) -> tuple[str, ...]:
    """Return the changes as lines for people; none in a run's first step."""
    path = StepFolder.at(batch.run, batch.step - 1).manifest
    if not path.exists():
        return ()
    before = read_manifest(path.parent)
    return program_changes(Ran(before.engine, before.trainer, before.reward_source), Ran(engine, trainer, reward_source))


@counted("manifest")
def commit(made: StepReport, manifest: Manifest) -> None:
    """Sync the adapter's files, the trainer's report and the figures to the disk, then write the step's report, and the manifest last: a step with
    a manifest is committed.

    Raises:
        ValueError: for a metric that is not finite. Nothing is committed then.
    """
    wrong = {name: value for name, value in made.metrics.items() if not math.isfinite(value)}
    if wrong:
        raise ValueError(f"step {made.step} of run {made.run!r} is not committed, these metrics are not finite: {wrong}")
    sync_folder(adapter_folder(made.run, made.adapter.version))
    sync(adapter_folder(made.run, made.adapter.version).parent)  # its name
    for path in (StepFolder.of(made).train.result, StepFolder.of(made).train.path):
        sync(path)
    for folder in (folder_of(made.run, made.step), memory_usage.folder_of(made.run, made.step)):
        if folder.exists():
            sync_folder(folder)
    write_json(StepFolder.of(made).report, made.model_dump(mode="json"))
    write_json(StepFolder.of(made).manifest, manifest.model_dump(mode="json"))
    log.info("step %d of run %s is committed: adapter %d, %s", made.step, made.run, made.adapter.version, made.adapter.sha256)


@task(cache_policy=NO_CACHE)
def commit_step(
    config: RunConfig,
    plan: Plan,
    start: AdapterVersion,
    prompts: PromptBatch,
    rollouts: Rollouts,
    scored: ScoredRollouts,
    batch: TrainBatch,
    trained: AdapterVersion,
) -> StepReport:
    """All records of a step -> StepReport. The step is committed when this returns.

    Raises:
        DigestMismatch: for a file that is not what its record says. Prefect gives back the records of an earlier attempt without a look at it.
    """
    for file in (prompts.file, rollouts.file, scored.file, batch.file):
        verified(file)
    outcome = read_json(StepFolder.of(batch).train.result)
    measures = summed_draws(measures_of(batch.run, batch.step))
    metrics = metrics_of(rollouts, scored, outcome, measures) | times_of(batch, time.time())
    metrics["rollout/age"] = start.version - rollouts.adapter_version + metrics["rollout/older_tokens_frac"]
    if max_staleness(config):
        metrics["rollout/steps_ahead"] = num_steps_ahead(config, batch.step)
    metrics |= unused.metrics_of_step(prompts, rollouts, int(measures.get("roll_out", {}).get("num_unused", 0)))
    metrics |= memory_usage.metrics_of(memory_usage.of_step(batch.run, batch.step)) | gpu_idle_of(batch.run, batch.step)
    metrics |= (prompts.rows.metrics if prompts.rows else {}) | prompts.draw_counts
    metrics |= step_forecast.metrics_of(read_forecast(batch.run), batch.step - lineage.first_step(batch.run), metrics)
    made = StepReport(run=batch.run, step=batch.step, adapter=trained, metrics=metrics)
    # Before the commit: afterwards another process may upload the step's files to MLflow.
    ran = programs_of(batch, outcome)
    page = step_page.write_page(
        made, config, plan, page_of_this_flow(), changes_since_step_before(batch, *ran, scored.reward_source)
    )
    by_model.keep_paid(StepFolder.of(batch).paid, batch.run, step_work(batch.step))
    commit(made, manifest_of(config, plan, prompts, rollouts, scored, batch, start, trained, ran))
    brief.info("%s", page.line)
    write_json(StepFolder.of(made).check_costs, check_costs.taken())
    upload.start_upload(made.run)
    show_step(made, page.report)
    stop_what_leaks(made)
    return made
