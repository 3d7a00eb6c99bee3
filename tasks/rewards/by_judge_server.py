"""A second model as the judge, in a server of its own that takes turns with the engine and the trainer.

step begins -> the judge sleeps -> engine samples -> engine releases -> judge wakes, judges, releases -> scoring, training

The judge's answers go into the ledger, where the scoring reads them: it needs no judge. The server wakes with the first request that is
missing there. So a step that is killed after its judgements wakes nothing.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import task

from infra import engines
from infra.colocation import judge as turns
from infra.colocation import plans
from infra.colocation.judge_section import server_of
from infra.colocation.machine import this_machine
from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.concurrency.prefetch import Prefetch
from infra.config import ATTENTION, EngineConfig, JudgeConfig, RewardConfig, RunConfig
from infra.data.chat_templates import of_model
from infra.engines import open_engine, open_judge
from infra.models import base_model
from infra.records import AdapterVersion, PromptBatch, Rollouts
from infra.rewards.judges.cases import Ask
from infra.runs.bad_answers import save_bad_answer
from infra.telemetry import memory_usage
from infra.telemetry.timings import measured
from tasks.rewards import by_model
from tasks.rewards.by_engine import asker
from tasks.support.caching import NO_CACHE
from tasks.support.progress_artifacts import progress_artifacts
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try

log = logging.getLogger(__name__)


def version_of(judge: JudgeConfig, run: str) -> AdapterVersion:
    """Return the judge's model as version 0 of a run that does not train it."""
    return AdapterVersion(
        run=run, version=0, base=base_model.reference(judge.model), rank=1, alpha=1, target_modules=ATTENTION, seed=0
    )


def sha256_of(reward: RewardConfig) -> str:
    """Digest of the judge's model; empty where no second model judges."""
    return base_model.reference(reward.judge.model).sha256 if reward.has_judge_server else ""


def check_model(reward: RewardConfig) -> None:
    """Check the judge's model, if a second model judges. Raises ValueError, in one line, for one that cannot judge."""
    if not reward.has_judge_server:
        return
    judge = reward.judge
    try:
        with progress_artifacts():  # it may have to be downloaded
            folder = base_model.locate(judge.model)
        base_model.check_supported(folder)
        positions = base_model.num_positions(folder)
        of_model(folder, base_model.tokenizer(folder))
    except ValueError as error:
        raise ValueError(f"reward.judge.model: {error}") from error
    if judge.server.max_context_tokens > positions:
        raise ValueError(
            f"reward.judge.server.max_context_tokens {judge.server.max_context_tokens} is more than the {positions} positions of model "
            f"{judge.model!r}"
        )


def check_turns(config: RunConfig) -> None:
    """Check that engine, judge and trainer can take turns here, and log which model holds the GPUs when. Raises ValueError if they cannot."""
    if not config.reward.has_judge_server:
        return
    if plans.plan(config).colocation == "separate_gpus":
        raise ValueError(
            "RATCHET_ENGINE_GPUS and RATCHET_TRAINER_GPUS with reward.judge.by 'model': the engine would never make room for the judge; "
            "let both share the GPUs, or take a judge that is an endpoint"
        )
    engine, trainer, plan = plans.resolve_colocation(config)
    turns.check_room(config, engine, trainer, this_machine())
    log.info("turns with the judge: %s", plan.judge)


@contextmanager
def judge_awake(engine: EngineConfig, judge: JudgeConfig, run: str, deadline: Deadline = NO_DEADLINE) -> Iterator[Ask]:
    """Give what asks the judge. Its server wakes with the first request, and has released its memory when the block ends.

    engine: Of the run. Its memory must be released. deadline: After it nothing is sent, and what is under way is aborted.
    """
    server, version = server_of(engine, judge), version_of(judge, run)
    opened = open_judge(server, version)
    try:
        yield asker(server, version, judge, deadline, lambda *of_base: opened, "reward.judge.server.max_context_tokens")
    finally:
        released = opened.release_memory()
        log.info("the judge has released %d bytes by plan %s", released.released_bytes, released.plan)


@contextmanager
def asked_by(engine: EngineConfig, reward: RewardConfig, adapter: AdapterVersion, deadline: Deadline) -> Iterator[Ask]:
    """Give what asks the run's own engine, or the judge's server, for which the engine releases its memory first."""
    if not reward.has_judge_server:
        yield asker(engine, adapter, reward.judge, deadline)
        return
    open_engine(engine, adapter).release_memory()
    with judge_awake(engine, reward.judge, adapter.run, deadline) as ask:
        yield ask


def start_judge(engine: EngineConfig, reward: RewardConfig, adapter: AdapterVersion, prefetch: Prefetch | None = None) -> None:
    """Have the judge's server live and sleep before the engine takes its memory, or end one that a run without a judge has found.

    prefetch: Rollouts that may run in the engine already: the server is started when it is needed then.
    """
    if not reward.has_judge_server:
        engines.stop_judge()
    elif prefetch is None or not prefetch.is_running:
        put_judge_to_sleep(engine, reward.judge, adapter)


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def put_judge_to_sleep(engine: EngineConfig, judge: JudgeConfig, adapter: AdapterVersion) -> None:
    """Launch the judge's server if it does not live, golden check included, and have it release its memory."""
    place = (adapter.run, adapter.version)
    with measured(*place, "start_judge"), save_bad_answer(*place, "start_judge"):
        opened = open_judge(server_of(engine, judge), version_of(judge, adapter.run))
        if not opened.is_asleep():
            open_engine(engine, adapter).release_memory()  # an engine of an earlier process may be awake
            opened.start_asleep()


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def ask_judge(
    engine: EngineConfig,
    reward: RewardConfig,
    rollouts: Rollouts,
    prompts: PromptBatch,
    adapter: AdapterVersion,
    deadline: Deadline,
) -> None:
    """Rollouts -> answers in the ledger. What it holds already is not asked again."""
    place = (rollouts.run, rollouts.step)
    awake = judge_awake(engine, reward.judge, rollouts.run, deadline)
    with measured(*place, "judge"), save_bad_answer(*place, "judge"), awake as ask:
        by_model.judge_step(reward, rollouts, prompts, ask, sha256_of(reward), deadline)
        memory_usage.note(*place, "judging")
