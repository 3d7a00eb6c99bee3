"""Evaluate an adapter on held-out questions: pass@1 of greedy answers, pass@k of sampled ones."""

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from prefect import task

from infra.config import DataConfig, EngineConfig, EvalConfig, SamplingConfig
from infra.data import dataset, prompts
from infra.data.prompts import Prompt, num_overlapping
from infra.engines import open_engine
from infra.engines.interface import RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.sampling import inputs_key, sample_all
from infra.failures import RewardFailed
from infra.models import base_model
from infra.progress.brief import brief
from infra.records import AdapterVersion, Evaluation
from infra.reporting import brief_lines
from infra.runs import evaluations
from infra.store.files import record_of, write_json_lines
from infra.store.layout import EvaluationFolder
from infra.store.samples import Sample, groups_of, read_samples, write_samples
from tasks import rewards
from tasks.rewards.apply import judged
from tasks.rewards.by_engine import asker
from tasks.rewards.by_model import JudgedWork
from tasks.support.caching import cached
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples passes, from num_samples of which num_passed passed: Chen et al. 2021,
    arXiv 2107.03374, equation 1."""
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def share_passed(samples: Sequence[Sample], pass_reward: float) -> float:
    """Share of judged answers that pass."""
    return fmean(float(reward >= pass_reward) for reward in rewards_of(samples))


def mean_pass_at_k(samples: Sequence[Sample], k: int, pass_reward: float) -> float | None:
    """Mean of pass@k over questions. An unjudged answer leaves n of its question; a question with fewer than k judged is left out. None if all
    are left out."""
    by_question = [rewards_of(group) for group in groups_of(samples)]
    found = [pass_at_k(len(of), sum(each >= pass_reward for each in of), k) for of in by_question if len(of) >= k]
    return fmean(found) if found else None


def rewards_of(samples: Sequence[Sample]) -> list[float]:
    """Return the rewards of the judged samples."""
    return [sample.reward for sample in samples if sample.reward is not None]


def check_questions(eval_config: EvalConfig, run: str) -> None:
    """Raises ValueError if earlier evaluations of the run had other questions: their figures cannot be compared."""
    now = dataset.fingerprint(eval_config.data)
    for earlier in evaluations.of_run(run, eval_config):
        if earlier.dataset_fingerprint not in ("", now):
            raise ValueError(
                f"the held-out data set {eval_config.data.source!r} (split {eval_config.data.split!r}) has changed since "
                f"adapter {earlier.step} of run {run!r} was evaluated: its digest is {now}, recorded was "
                f"{earlier.dataset_fingerprint}. Put it back, or make it another evaluation (another evaluation.num_prompts, say)"
            )


def _answered(
    engine: EngineConfig, sampling: SamplingConfig, asked: list[Prompt], adapter: AdapterVersion, path: Path
) -> list[Sample]:
    """Return the answers to the questions, in the folder of path. Answers recovered from the journal of an earlier attempt are not generated
    again."""
    fence = inputs_key(engine, sampling, record_of(EvaluationFolder(path.parent).questions), adapter)
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


def _scores_journal(path: Path) -> Path:
    return path.with_suffix(".scores.journal")


def _judgements(path: Path) -> Path:
    return path.with_suffix(".judgements.jsonl")


@task(
    cache_policy=cached(
        also=lambda inputs: rewards.source_digests(inputs["eval_config"].reward) + dataset.fingerprint(inputs["eval_config"].data)
    ),
    retries=MAX_RETRIES,
    retry_delay_seconds=BACKOFF,
    retry_condition_fn=worth_another_try,
)
def evaluate_adapter(engine: EngineConfig, eval_config: EvalConfig, training: DataConfig, adapter: AdapterVersion) -> Evaluation:
    """AdapterVersion -> Evaluation.

    training: The training data, which should not contain the held-out questions.
    """
    begun = time.monotonic()
    check_questions(eval_config, adapter.run)
    asked = prompts.held_out(eval_config.data, base_model.locate(adapter.base.id))
    folder = EvaluationFolder(evaluations.folder_of(adapter, eval_config))
    write_json_lines(folder.questions, (prompt._asdict() for prompt in asked))
    wanted = {folder.greedy: eval_config.greedy} | ({folder.sampled: eval_config.sampled} if eval_config.sampled else {})
    for path, sampling in wanted.items():
        answers = _answered(engine, sampling, asked, adapter, path)
        inputs = {"questions": record_of(folder.questions).sha256, "answers": digest_of(answers)}
        ask = asker(engine, adapter, eval_config.reward.judge)
        work = JudgedWork(adapter.run, f"evaluation {adapter.version}", _judgements(path), ask, adapter.base.sha256)
        write_samples(path, judged(eval_config.reward, answers, asked, _scores_journal(path), inputs, stops=False, work=work))
    greedy, sampled = read_samples(folder.greedy), read_samples(folder.sampled) if eval_config.sampled else []
    if not rewards_of(greedy):
        raise RewardFailed(
            f"none of the {len(greedy)} greedy answers could be judged: correct the reward, then run the same again"
        )
    answers, judged_rewards = [*greedy, *sampled], rewards_of([*greedy, *sampled])
    num_unjudged = len(answers) - len(judged_rewards)
    made = Evaluation(
        run=adapter.run,
        step=adapter.version,
        adapter_sha256=adapter.sha256,
        eval_digest=evaluations.eval_digest(eval_config),
        dataset_fingerprint=dataset.fingerprint(eval_config.data),
        file=record_of(folder.greedy),
        num_prompts=len(asked),
        num_overlapping=num_overlapping(asked, eval_config.data, training),
        pass_at_1=share_passed(greedy, eval_config.pass_reward),
        pass_at_k={
            str(k): value
            for k in eval_config.pass_at_k
            if (value := mean_pass_at_k(sampled, k, eval_config.pass_reward)) is not None
        },
        truncated_frac=fmean(float(sample.finish_reason == "length") for sample in greedy),
        mean_reward=fmean(rewards_of(greedy)),
        max_reward=max(judged_rewards),
        mean_output_tokens=fmean(len(sample.output_tokens) for sample in greedy),
        is_binary=all(reward in (0.0, 1.0) for reward in judged_rewards),
        num_unjudged=num_unjudged,
        num_unjudged_questions=sum(not rewards_of(group) for group in groups_of(answers)),
        is_eligible=num_unjudged <= eval_config.reward.max_unjudged_frac * len(answers),
    )
    before = [each for each in evaluations.of_run(adapter.run, eval_config) if each.step < adapter.version]
    seconds = time.monotonic() - begun
    evaluations.write(folder.path, made, eval_config=eval_config.model_dump(mode="json"), at=time.time(), seconds=seconds)
    for path in wanted:
        _journal(path).unlink(missing_ok=True)
        _scores_journal(path).unlink(missing_ok=True)
    brief.info("%s", brief_lines.evaluation_line(made, before[-1] if before else None, seconds))
    return made
