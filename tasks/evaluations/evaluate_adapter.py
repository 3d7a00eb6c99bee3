"""Evaluate an adapter on the questions of one set: greedy answers, sampled ones, or both; see infra/runs/eval_figures.py for the figures."""

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from prefect import task

from infra.concurrency.deadline import Deadline
from infra.config import DataConfig, EngineConfig, EvalConfig, EvalSamplingConfig, PlayedEnvironment, SamplingConfig
from infra.data import dataset, prompts
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.sampling import inputs_key, sample_all
from infra.environments.inspect_tasks import running
from infra.eval_records import Evaluation
from infra.failures import RewardFailed
from infra.models import base_model
from infra.progress.brief import brief
from infra.records import AdapterVersion
from infra.reporting import brief_lines
from infra.rewards.judges.ledger import evaluation_work
from infra.runs import eval_figures, evaluations
from infra.runs.eval_figures import rewards_of
from infra.store.files import record_of, run_id, write_json_lines
from infra.store.layout import EvaluationFolder
from infra.store.samples import Sample, episodes_of, groups_of, read_samples, write_samples
from tasks import rewards
from tasks.rewards import by_inspect, by_judge_server, by_model, by_reward_model
from tasks.rewards.apply import judged
from tasks.rewards.by_inspect import Asked
from tasks.rewards.by_model import JudgedWork
from tasks.support.caching import cached
from tasks.support.episode_rollout import Journals, made_from_episodes, played, request_of, source_of
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try

log = logging.getLogger(__name__)


def check_questions(eval_config: EvalConfig, run: str, now: str) -> None:
    """Raises ValueError if earlier evaluations of the run had other questions: their figures cannot be compared.

    now: Digest of the questions' data set.
    """
    source = eval_config.inspect or eval_config.data.source
    for earlier in evaluations.of_run(run, eval_config):
        if earlier.dataset_fingerprint not in ("", now):
            raise ValueError(
                f"the held-out data set {source!r} (split {eval_config.data.split!r}) has changed since "
                f"adapter {earlier.step} of run {run!r} was evaluated: its digest is {now}, recorded was "
                f"{earlier.dataset_fingerprint}. Put it back, or make it another evaluation (another evaluation.num_prompts, say)"
            )


def _answered(
    engine: EngineConfig,
    sampling: SamplingConfig,
    environment: PlayedEnvironment | None,
    asked: list[Prompt],
    adapter: AdapterVersion,
    path: Path,
) -> list[Sample]:
    """Return the answers to the questions, in the folder of path. Answers, turns and episodes in the journals of an earlier attempt are not
    generated again."""
    fence = inputs_key(engine, sampling, record_of(EvaluationFolder(path.parent).questions), adapter)
    if environment is not None:
        request = request_of(engine, sampling, environment, asked, adapter)
        request = request._replace(of=f"{run_id(adapter.run)} {path.parent.name} {path.stem}")
        return played(
            open_engine(engine, adapter), request, _journals(path), made_from_episodes(fence, environment), stops=False
        )[0]
    with Journal(_journal(path), fence) as journal:
        return sample_all(open_engine(engine, adapter), RolloutRequest(asked, sampling, adapter), SampleSink(journal))[0]


def digest_of(answers: Sequence[Sample]) -> str:
    """Digest what rewards get of answers."""
    found = [
        (each.prompt_id, each.sample_index, list(map(int, each.output_tokens)), each.text, each.finish_reason) for each in answers
    ]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _journal(path: Path) -> Path:
    return path.with_suffix(".journal")


def _journals(path: Path) -> Journals:
    return Journals(path.with_suffix(".turns.journal"), path.with_suffix(".episodes.journal"))


def _scores_journal(path: Path) -> Path:
    return path.with_suffix(".scores.journal")


def _judgements(path: Path) -> Path:
    return path.with_suffix(".judgements.jsonl")


def also_decided_by(inputs: dict[str, Any]) -> str:
    """Digests of a user's code and data, and the id of the folder without which a result is invalid."""
    eval_config: EvalConfig = inputs["eval_config"]
    return f"{_sources(eval_config)} {evaluations.id_of_folder(inputs['adapter'], eval_config)}"


def _sources(eval_config: EvalConfig) -> str:
    """Digests of a user's code and data that give questions and rewards."""
    if eval_config.inspect:
        return _code_of(eval_config)
    return _code_of(eval_config) + dataset.fingerprint(eval_config.data)


def _code_of(eval_config: EvalConfig) -> str:
    """Digests of a user's code that gives rewards."""
    if eval_config.inspect:
        return running.source_of(eval_config.inspect)
    environment = eval_config.environment
    return source_of(environment) if environment else rewards.source_digests(eval_config.reward)


def reward_source(eval_config: EvalConfig) -> str:
    """Return what an evaluation's record says of that code. Empty for a program, which may write to a file that it is given."""
    if eval_config.environment and eval_config.environment.command:
        return ""
    code = _code_of(eval_config)
    return hashlib.sha256(code.encode()).hexdigest() if code.strip() else ""


def _warn_of_other_rewards(made: Evaluation, earlier: Sequence[Evaluation]) -> None:
    if others := [each.step for each in earlier if each.reward_source not in ("", made.reward_source)]:
        log.warning(
            "adapter %s was evaluated by another state of the reward: its figures are not those of adapter %d, and the best adapter is chosen "
            "among those that were evaluated as the latest; `ratchet evaluate %s --adapter N` evaluates one again",
            *(", ".join(map(str, others)), made.step, made.run),
        )


@task(
    cache_policy=cached(also=also_decided_by),
    retries=MAX_RETRIES,
    retry_delay_seconds=BACKOFF,
    retry_condition_fn=worth_another_try,
)
def evaluate_adapter(engine: EngineConfig, eval_config: EvalConfig, training: DataConfig, adapter: AdapterVersion) -> Evaluation:
    """AdapterVersion -> Evaluation.

    training: The training data, which should not contain the held-out questions.
    """
    begun = time.monotonic()
    folder = EvaluationFolder(evaluations.folder_of(adapter, eval_config))
    wanted = {path: sampling for path, sampling in _wanted(folder, eval_config).items() if sampling}
    if eval_config.inspect:
        asked = by_inspect.ask(engine, eval_config, adapter, wanted)
        check_questions(eval_config, adapter.run, asked.fingerprint)
    else:
        asked = _ask(engine, eval_config, training, adapter, wanted)
    made = _evaluation(eval_config, adapter, asked, wanted)
    before = [each for each in evaluations.of_run(adapter.run, eval_config) if each.step < adapter.version]
    _warn_of_other_rewards(made, before)
    seconds = time.monotonic() - begun
    by_model.keep_paid(folder.paid, adapter.run, evaluation_work(adapter.version))
    evaluations.write(folder.path, made, eval_config=eval_config.model_dump(mode="json"), at=time.time(), seconds=seconds)
    for path in wanted:
        _journal(path).unlink(missing_ok=True)
        _scores_journal(path).unlink(missing_ok=True)
        _journals(path).remove()
    brief.info("%s", brief_lines.evaluation_line(made, before[-1] if before else None, seconds))
    return made


def _ask(
    engine: EngineConfig,
    eval_config: EvalConfig,
    training: DataConfig,
    adapter: AdapterVersion,
    wanted: Mapping[Path, EvalSamplingConfig],
) -> Asked:
    """Write the set's questions, and the judged answers to them."""
    fingerprint = dataset.fingerprint(eval_config.data)
    check_questions(eval_config, adapter.run, fingerprint)
    asked = prompts.held_out(eval_config.data, base_model.locate(adapter.base.id))
    folder = EvaluationFolder(evaluations.folder_of(adapter, eval_config))
    write_json_lines(folder.questions, (prompt.to_json() for prompt in asked))
    for path, sampling in wanted.items():
        answers = _answered(engine, sampling, eval_config.environment, asked, adapter, path)
        if eval_config.environment is not None:
            write_samples(path, answers)
            continue
        inputs = {"questions": record_of(folder.questions).sha256, "answers": digest_of(answers)}
        reward = eval_config.reward
        deadline = Deadline(reward.task_timeout_s).begin()
        by_reward_model.make_room(reward, partial(open_engine, engine, adapter))
        with by_judge_server.asked_by(engine, reward, adapter, deadline) as ask:
            sha256 = by_judge_server.sha256_of(reward) or adapter.base.sha256
            work = JudgedWork(adapter.run, evaluation_work(adapter.version), _judgements(path), ask, sha256)
            found = judged(reward, answers, asked, _scores_journal(path), inputs, stops=False, work=work, deadline=deadline)
            write_samples(path, found)
    return Asked(len(asked), prompts.num_overlapping(asked, eval_config.data, training), fingerprint, {})


def _wanted(folder: EvaluationFolder, eval_config: EvalConfig) -> dict[Path, EvalSamplingConfig | None]:
    """The files of answers, and how these are sampled; None: they are not asked for."""
    return {folder.greedy: eval_config.greedy, folder.sampled: eval_config.sampled}


def _evaluation(eval_config: EvalConfig, adapter: AdapterVersion, asked: Asked, files: Iterable[Path]) -> Evaluation:
    """files: Those of the answers, the greedy ones first."""
    by_file = {path: eval_figures.answers_in(path) for path in files}
    whole = episodes_of(read_samples(next(iter(by_file))))
    (first, main), answers = next(iter(by_file.items())), [sample for samples in by_file.values() for sample in samples]
    sampled = [*by_file.values()][-1] if eval_config.num_samples else []
    judged_rewards, num_unjudged = rewards_of(answers), len(answers) - len(rewards_of(answers))
    if not rewards_of(main):
        raise RewardFailed(
            f"none of the {len(main)} {'greedy' if eval_config.has_greedy else 'sampled'} answers could be judged: correct the "
            f"{'environment' if eval_config.environment else 'reward'}, then run the same again"
        )
    return Evaluation(
        run=adapter.run,
        step=adapter.version,
        set_name=eval_config.name,
        adapter_sha256=adapter.sha256,
        eval_digest=evaluations.eval_digest(eval_config),
        dataset_fingerprint=asked.fingerprint,
        reward_source=reward_source(eval_config),
        file=record_of(first),
        num_prompts=asked.num_prompts,
        num_overlapping=asked.num_overlapping,
        task_metrics=asked.task_metrics,
        truncated_frac=fmean(float(any(each.is_truncated for each in episode)) for episode in whole),
        mean_output_tokens=fmean(sum(each.num_sampled_tokens for each in episode) for episode in whole),
        mean_turns=fmean(sum(each.num_turns for each in episode) for episode in whole) if eval_config.environment else None,
        max_reward=max(judged_rewards),
        is_binary=all(reward in (0.0, 1.0) for reward in judged_rewards),
        num_answers=len(answers),
        num_unjudged=num_unjudged,
        num_unjudged_questions=sum(not rewards_of(group) for group in groups_of(answers)),
        is_eligible=num_unjudged <= eval_config.reward.max_unjudged_frac * len(answers),
        **_figures(eval_config, main, sampled),
    )


def _figures(eval_config: EvalConfig, main: Sequence[Sample], sampled: Sequence[Sample]) -> dict[str, Any]:  # Any: of Evaluation
    """Fields of an evaluation that are means over questions.

    main: The greedy answers, or the sampled ones where there are no greedy ones.
    """
    mark = eval_config.pass_reward
    of_k = {str(k): eval_figures.mean_pass_at_k(sampled, k, mark) for k in eval_config.pass_at_k}
    rewards_by_question = eval_figures.by_question(main)
    return {
        "pass_at_1": fmean(eval_figures.by_question(main, mark).values()),
        "pass_at_k": {k: value for k, value in of_k.items() if value is not None},
        "mean_reward": fmean(rewards_by_question.values()),
        "reward_interval": eval_figures.interval([*rewards_by_question.values()]),
        "mean_at_n": eval_figures.interval([*eval_figures.by_question(sampled).values()]),
        "num_samples": eval_config.num_samples,
        "part_means": eval_figures.part_means(main),
    }
